"""The newest valid checkpoint of a run, for whoever names only the run."""

from __future__ import annotations

from titanlite.checkpoint.listing import list_steps
from titanlite.checkpoint.manifest import NAME, read_checkpoint_manifest
from titanlite.errors import CheckpointError
from titanlite.log import logger
from titanlite.storage import StorageFolder


def find_newest_checkpoint(place: StorageFolder) -> StorageFolder:
    """The checkpoint at `place`, or the newest valid one of the run or checkpoint folder there.

    Those that are cut short or damaged are passed over with a warning. Raises CheckpointError.
    """
    if place.name.startswith("step-") or NAME in place.sizes():
        return place
    for folder in (place, place / "checkpoint"):
        for step in reversed(list_steps(folder).steps):
            try:
                read_checkpoint_manifest(folder / f"step-{step}")
            except CheckpointError as error:
                logger.warning("passed over: %s", error)
            else:
                return folder / f"step-{step}"
    raise CheckpointError(
        f"{place}: is not a checkpoint, and no valid one is in it.",
        fix="Give a run (its job.dump_folder), or the folder of one step, such as"
        " outputs/checkpoint/step-100.",
    )
