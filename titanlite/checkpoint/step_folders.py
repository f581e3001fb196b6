"""The step folders of a run: how they are listed and set aside, and which ones are removed."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_checkpoint_manifest
from titanlite.distributed.collectives import run_on_rank_0
from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.storage import UNFINISHED, StorageFolder, StorageUnreachable

P = ParamSpec("P")
T = TypeVar("T")

ASIDE = "aside"  # marker file of a step that is set aside, where folders cannot be renamed
_ASIDE_CONTENT = b"Delete this file, and the checkpoint in this folder is used again.\n"
# The checkpoint.load_step that was applied last, so that a restart does not roll back again.
LOAD_STEP_FILE = "load_step.json"
HISTORY_FILE = "memory.json"  # names the history of the memory checkpoints: see memory_sets.py


@dataclass(frozen=True)
class CheckpointListing:
    """The step folders of a checkpoint folder."""

    steps: list[int]  # neither aside nor unfinished, but not validated yet; oldest first
    aside: list[str]  # names of folders set aside: see checkpoint.keep_aside_k; lowest step first
    unfinished: list[str]  # names of folders whose save or removal was interrupted


def list_steps(folder: StorageFolder) -> CheckpointListing:
    """List the step folders of a checkpoint folder by their state."""
    steps, aside, unfinished = [], [], []
    for name in folder.folders():
        match = re.fullmatch(r"step-(\d+)(\.aside-\d+)?((?:\.removed)*)", name)
        if not match:
            continue
        files = (folder / name).sizes()
        is_unfinished = not files or (UNFINISHED in files and MANIFEST_FILE not in files)
        if match[3] or is_unfinished:
            unfinished.append(name)
        elif match[2] or ASIDE in files:
            aside.append(name)
        else:
            steps.append(int(match[1]))
    return CheckpointListing(sorted(steps), sorted(aside, key=step_sort_key), unfinished)


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


def _on_rank_0(
    method: Callable[Concatenate[StepFolders, P], T],
) -> Callable[Concatenate[StepFolders, P], T]:
    """Let rank 0 call a method of `StepFolders`, and every rank return its result, as JSON."""

    @wraps(method)
    def call(folders: StepFolders, *args: P.args, **kwargs: P.kwargs) -> T:
        def act() -> T:
            try:
                return method(folders, *args, **kwargs)
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename or folders.folder}: {error.strerror or error}."
                ) from error

        return run_on_rank_0(act, folders.group)

    return call


class StepFolders:
    """The folders `step-N` of one run.

    To set aside a checkpoint is to keep its files, but to exclude it from every later start.

    Collective methods act on rank 0, while the other ranks wait for its result or error in `group`,
    whose timeout is long: an object store can take minutes to list or remove many checkpoints.
    """

    def __init__(
        self,
        folder: StorageFolder,
        config: CheckpointConfig,
        check_lease: Callable[[], int],
        group: dist.ProcessGroup | None,
    ):
        """`check_lease` raises CheckpointError if another job owns the folder; called on rank 0."""
        self.folder, self.config = folder, config
        self.check_lease, self.group = check_lease, group

    def of_step(self, step: int) -> StorageFolder:
        return self.folder / f"step-{step}"

    # --- collective ----------------------------------------------------------------------------

    @_on_rank_0
    def list_to_start(self) -> tuple[list[int], list[str], int]:
        """(steps, unfinished folders, the checkpoint.load_step that was applied last, or -1).

        A run that saves, but not in memory, ends the history: what it trains will not be there.
        """
        applied = self._read_applied_load_step()
        listing = list_steps(self.folder)
        leaves_memory = self.config.saves and not self.config.memory_interval
        if leaves_memory and HISTORY_FILE in self.folder.sizes():
            self.check_lease()
            self.folder.delete(HISTORY_FILE)
        return listing.steps, listing.unfinished, applied

    @_on_rank_0
    def read_history(self) -> list[Any]:
        """[name of the history, the set that it was loaded from or None], see `begin_history`."""
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
            record = parse_json(self.folder.read(HISTORY_FILE))
            return [record["name"], record["base"]]
        return [None, None]

    @_on_rank_0
    def begin_history(self, base: tuple[str, int] | None) -> str:
        """Invalidate all memory checkpoints but `base` (history, step); returns the new history."""
        self.check_lease()
        self.folder.create_folder()
        name = uuid.uuid4().hex
        record = json.dumps({"name": name, "base": base})
        self.folder.write_atomically(HISTORY_FILE, record.encode())
        return name

    @_on_rank_0
    def positions(self, with_optimizer: bool) -> tuple[list[tuple[int, int]], list[str]]:
        """(step and data position of each checkpoint, why others are damaged).

        Only of those that retention keeps: a kill between a save and the removal of older
        checkpoints leaves more. `with_optimizer`: only of those that have optimizer state.
        """
        manifests, damaged = {}, []
        for step in list_steps(self.folder).steps:
            try:
                manifests[step] = read_checkpoint_manifest(self.of_step(step))
            except StorageUnreachable:  # it may be valid
                raise
            except CheckpointError as error:
                damaged.append(str(error))
        surplus = steps_to_remove(manifests, self.config.keep_latest_k, self.config.keep_every)
        positions = [
            (step, manifest.progress["position"])
            for step, manifest in manifests.items()
            if step not in surplus
            and "position" in manifest.progress  # otherwise only the weights of another run
            and (manifest.has("optimizer") or not with_optimizer)
        ]
        return positions, damaged

    @_on_rank_0
    def remove_unfinished(self, names: list[str]) -> None:
        """Remove folders that a crash left; under the lease, no other job is writing there."""
        for name in names if self.config.saves else ():
            folder = self.folder / name
            logger.warning("%s: removed, because its save or removal was interrupted", folder)
            self._remove(folder)

    @_on_rank_0
    def set_aside_later(self, step: int) -> None:
        """Set aside the checkpoints of later steps, then record that load_step was applied."""
        self.check_lease()
        for later in list_steps(self.folder).steps:
            if later > step:
                folder = self.of_step(later)
                name = set_aside(folder)
                logger.warning(
                    "%s: set aside as %s, because the run resumes from an earlier step",
                    folder,
                    name,
                )
        if self.config.load_step != -1:
            # Written last: after a crash before this line, the next start applies load_step again.
            applied = {"load_step": self.config.load_step}
            self.folder.write_atomically(LOAD_STEP_FILE, json.dumps(applied).encode())

    @_on_rank_0
    def remove_failed_save(self, step_folder: StorageFolder) -> None:
        """Free the disk space of a save that failed, unless it was committed."""
        self._remove(step_folder, unless=MANIFEST_FILE)

    # --- on one rank ---------------------------------------------------------------------------

    def valid_steps(self) -> list[int]:
        """Steps of the checkpoints with a valid manifest and right file sizes, oldest first."""
        return [step for step in list_steps(self.folder).steps if self._is_valid(step)]

    def remove_surplus(self) -> None:
        """Remove the checkpoints that the retention settings do not keep."""
        config = self.config
        names = all_but_last(list_steps(self.folder).aside, config.keep_aside_k)
        steps = steps_to_remove(self.valid_steps(), config.keep_latest_k, config.keep_every)
        for name in (*names, *(f"step-{step}" for step in steps)):
            self._remove(self.folder / name)

    def _is_valid(self, step: int) -> bool:
        try:
            read_checkpoint_manifest(self.of_step(step))
        except CheckpointError:
            return False
        return True

    def _read_applied_load_step(self) -> int:
        """The step in load_step.json, or -1; a run that saves deletes it if load_step = -1."""
        applied = -1
        try:
            applied = parse_json(self.folder.read(LOAD_STEP_FILE))["load_step"]
            if self.config.saves and self.config.load_step == -1:
                # A later start may set the same load_step again, and then it must be applied.
                self.check_lease()
                self.folder.delete(LOAD_STEP_FILE)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ValueError, TypeError, KeyError):
            logger.warning("%s/%s: is damaged, and is ignored", self.folder, LOAD_STEP_FILE)
        return applied

    def _remove(self, folder: StorageFolder, unless: str = "") -> None:
        """Remove a folder unless it has the file `unless`; log a warning if that fails."""
        try:
            self.check_lease()
            if folder.exists() and unless not in folder.sizes():
                folder.remove(delete_first=MANIFEST_FILE)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: could not be removed: %s", folder, error)


def steps_to_remove(steps: Iterable[int], keep_latest: int, keep_every: int = 0) -> list[int]:
    """The steps of valid checkpoints to remove, oldest first.

    Kept are the latest `keep_latest` (0: all), and multiples of `keep_every` (0: none).
    """
    surplus = all_but_last(sorted(steps), keep_latest)
    return [step for step in surplus if not keep_every or step % keep_every]


def all_but_last(ordered: list[T], keep: int) -> list[T]:
    """The entries before the last `keep`; empty if `keep` is 0, which keeps all."""
    return ordered[:-keep] if keep > 0 else []
