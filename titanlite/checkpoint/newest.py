"""Find the newest valid checkpoint of a run, for scripts that accept a run or a checkpoint."""

from __future__ import annotations

from titanlite.checkpoint.listing import list_steps
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_checkpoint_manifest
from titanlite.errors import CheckpointError
from titanlite.log import logger
from titanlite.storage import StorageFolder


def find_newest_checkpoint(folder: StorageFolder) -> StorageFolder:
    """`folder` itself if it is a checkpoint; else the newest valid checkpoint of that run.

    A run is given as its job.dump_folder, if checkpoint.folder is the default, or as the folder
    with its checkpoints.

    Damaged checkpoints are skipped with a warning, unfinished ones without a warning. Raises
    CheckpointError if none is valid.
    """
    if folder.name.startswith("step-") or MANIFEST_FILE in folder.sizes():
        return folder
    for parent in (folder, folder / "checkpoint"):
        for step in reversed(list_steps(parent).steps):
            try:
                read_checkpoint_manifest(parent / f"step-{step}")
            except CheckpointError as error:
                logger.warning("skipped: %s", error)
            else:
                return parent / f"step-{step}"
    raise CheckpointError(
        f"{folder}: is not a checkpoint, and contains no valid one.",
        fix="Give a run (its job.dump_folder, or the folder that checkpoint.folder names), or the"
        " folder of one step, such as"
        " outputs/checkpoint/step-100. Convert a Hugging Face folder first, by"
        " scripts/checkpoint.py from-hf.",
    )
