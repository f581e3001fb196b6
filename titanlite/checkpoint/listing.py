"""List step folders by their names and marker files, without opening a file; set one aside."""

from __future__ import annotations

import re
from dataclasses import dataclass

from titanlite.checkpoint.manifest import MANIFEST_FILE
from titanlite.storage import UNFINISHED, StorageFolder

ASIDE = "aside"  # marker file of a step that is set aside, where folders cannot be renamed
_ASIDE_CONTENT = b"Delete this file, and the checkpoint in this folder is used again.\n"


@dataclass(frozen=True)
class CheckpointListing:
    """The step folders of a checkpoint folder, as JSON types, which ranks can exchange."""

    steps: list[int]  # neither aside nor unfinished, but not validated yet; oldest first
    aside: list[str]  # names of folders set aside: damaged, or later than load_step; oldest first
    unfinished: list[str]  # names of folders whose save or removal was interrupted


def list_steps(folder: StorageFolder) -> CheckpointListing:
    """List the step folders of a checkpoint folder by their state."""
    steps, aside, unfinished = [], [], []
    for name in folder.folders():
        match = re.fullmatch(r"step-(\d+)(\.removed|\.aside-\d+)?", name)
        if not match:
            continue
        files = (folder / name).sizes()
        if match[2] == ".removed" or _is_unfinished(files):
            unfinished.append(name)
        elif match[2] or ASIDE in files:
            aside.append(name)
        else:
            steps.append(int(match[1]))
    return CheckpointListing(sorted(steps), sorted(aside, key=step_sort_key), unfinished)


def _is_unfinished(files: dict[str, int]) -> bool:
    return not files or (UNFINISHED in files and MANIFEST_FILE not in files)


def step_sort_key(name: str) -> tuple[int, int]:
    """Sort key of a step folder's name: its step, then the number of its `.aside-N`."""
    step, _, number = name.removeprefix("step-").partition(".aside-")
    return int(step), int(number or 0)


def set_aside(step_folder: StorageFolder) -> str:
    """Exclude a checkpoint from every later start without deleting it; returns its name.

    A local folder is renamed. In an object store a rename would copy every byte, so the folder is
    marked instead, and is overwritten when its step is saved again.
    """
    if not step_folder.local:
        step_folder.write_atomically(ASIDE, _ASIDE_CONTENT)
        return step_folder.name
    taken, number = set(step_folder.parent.folders()), 1
    while (name := f"{step_folder.name}.aside-{number}") in taken:
        number += 1
    return step_folder.rename(name).name
