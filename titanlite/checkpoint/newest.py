"""The newest valid checkpoint of a run, for whoever names only the run."""

from __future__ import annotations

import re

from titanlite.checkpoint.manifest import NAME, read_manifest
from titanlite.checkpoint.place import Place
from titanlite.errors import CheckpointError
from titanlite.log import logger

_STEP = re.compile(r"step-(\d+)")  # not step-300-hf, an export, nor step-300.aside-1


def newest_checkpoint(place: Place) -> Place:
    """The checkpoint at `place`, or the newest valid one of the run or checkpoint folder there.

    Those that are cut short or damaged are passed over with a warning. Raises CheckpointError.
    """
    if _STEP.fullmatch(place.name) or NAME in place.sizes():
        return place
    for folder in (place, place / "checkpoint"):
        steps = [int(found[1]) for name in folder.folders() if (found := _STEP.fullmatch(name))]
        for step in sorted(steps, reverse=True):
            try:
                read_manifest(folder / f"step-{step}")
            except CheckpointError as error:
                logger.warning("passed over: %s", error)
            else:
                return folder / f"step-{step}"
    raise CheckpointError(
        f"{place}: is not a checkpoint, and no valid one is in it.",
        fix="Give a run (its job.dump_folder), or the folder of one step, such as"
        " outputs/checkpoint/step-100.",
    )
