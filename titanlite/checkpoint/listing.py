"""The step folders of a checkpoint folder, by their names and marker files; none is opened."""

from __future__ import annotations

import re
from dataclasses import dataclass

from titanlite.checkpoint import manifest
from titanlite.storage import UNFINISHED, StorageFolder

ASIDE = "aside"  # marker file of a step that is set aside, where folders cannot be renamed
_RETURN = b"Delete this file, and the checkpoint in this folder is used again.\n"


@dataclass(frozen=True)
class CheckpointListing:
    """What is in a checkpoint folder. Numbers and names only, so that ranks can exchange it."""

    steps: list[int]  # of the folders that say they are checkpoints, oldest first
    aside: list[str]  # names of those set aside: damaged, or turned back from; oldest first
    unfinished: list[str]  # names of those that were being written, or removed


def list_steps(folder: StorageFolder) -> CheckpointListing:
    """Sort the step folders by what they are."""
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
    return CheckpointListing(sorted(steps), sorted(aside, key=step_and_number), unfinished)


def _is_unfinished(files: dict[str, int]) -> bool:
    return not files or (UNFINISHED in files and manifest.NAME not in files)


def step_and_number(name: str) -> tuple[int, int]:
    """What a step folder is sorted by: its step, then how often that step was set aside before."""
    step, _, number = name.removeprefix("step-").partition(".aside-")
    return int(step), int(number or 0)


def set_aside(step: StorageFolder) -> str:
    """Let no run use a checkpoint, and keep it; returns its new name.

    A local folder is renamed. In an object store a rename is a copy of every byte, so the folder is
    marked instead, and stays only until its step is saved again.
    """
    if not step.local:
        step.write_atomically(ASIDE, _RETURN)
        return step.name
    taken, number = set(step.parent.folders()), 1
    while (name := f"{step.name}.aside-{number}") in taken:
        number += 1
    return step.rename(name).name
