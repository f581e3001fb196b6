"""Exclusive use of the folders that a run writes to, and the log of the run's starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.distributed.collectives import run_on_rank_0
from titanlite.distributed.error_report import exit_code_of
from titanlite.errors import EXIT_DONE, CheckpointError
from titanlite.runtime.lease import Lease, Process, acquire_lease
from titanlite.runtime.start_log import StartLog
from titanlite.storage import StorageFolder

if TYPE_CHECKING:
    from titanlite.runtime.remote_lease import RemoteLease


class RunFolderLock:
    """Leases on the folders of a run, and its entry in the start log.

    Rank 0 holds the leases and writes the log; on the other ranks `leases` is empty.
    """

    def __init__(
        self, folder: Path, leases: list[Lease | RemoteLease], current_step: Callable[[], int]
    ):
        self.folder, self.leases, self._current_step = folder, leases, current_step
        self._start_log: StartLog | None = None  # once a start is recorded

    @property
    def lost(self) -> str:
        """How a folder was lost to another job, or ""; always "" on ranks other than 0."""
        return next((lease.lost for lease in self.leases if lease.lost), "")

    def check(self) -> int:
        """Read the leases again, on rank 0; returns the number of the last one, for fencing.

        That is of the last folder given to `lock_run_folders`. Raises CheckpointError if another
        job has taken a folder: call it immediately before a write that must not reach it.
        """
        for lease in self.leases:
            lease.check()
        return self.leases[-1].number if self.leases else 0

    def record_start(
        self, world_size: int, from_step: int, max_crashes: int, hosts: Sequence[str]
    ) -> None:
        """Record a start from `from_step`; in a crash loop, every rank raises CheckpointError.

        Call it as soon as `from_step` is known, because anything after it may crash.
        """

        def write() -> None:
            log = StartLog(self.folder)
            log.check_crash_loop(from_step, max_crashes, hosts)
            self.check()
            log.record_start(world_size, from_step, hosts)
            self._start_log = log

        run_on_rank_0(write)

    def record_rollback(self, step: int, to_step: int, reason: str) -> None:
        """Record a roll-back in the start log; does nothing on ranks other than 0."""
        if self._start_log:
            self._start_log.record_rollback(step, to_step, reason)

    def stopped_in_this_launch(self, hosts: Sequence[str]) -> bool:
        """Whether this is a restart by torchrun of a run that stopped on request."""
        return run_on_rank_0(lambda: StartLog(self.folder).stopped_in_this_launch(hosts))

    def release(self, code: int, reason: str = "") -> None:
        """Record how the run ended and release the leases; a second call does nothing."""
        if self._start_log:
            with suppress(CheckpointError):  # the log is another job's now
                self.check()
                self._start_log.record_end(code, self._current_step(), reason)
        for lease in self.leases:
            lease.close()
        self._start_log = None  # the leases stay: a save that is still running must see them lost


@contextmanager
def lock_run_folders(
    folder: Path, others: Mapping[str, StorageFolder], current_step: Callable[[], int]
) -> Iterator[RunFolderLock]:
    """Lock a run's `folder` and the `others` that it writes to, named by their configuration keys.

    `current_step` returns the steps taken so far, for the start log. Raises ConfigError on every
    rank if another job has locked one of the folders. An exception in the block is recorded. A
    block that ends with another code than EXIT_DONE, but no exception, must call `release(code)`.
    """
    own = StorageFolder(Path(os.path.realpath(folder)))  # resolve() raises on a circular link
    folders = {"job.dump_folder": own, **others}
    leases: list[Lease | RemoteLease] = []
    run_on_rank_0(lambda: leases.extend(_acquire_all(folders)))
    lock = RunFolderLock(folder, leases, current_step)
    try:
        yield lock
    except BaseException as error:
        lock.release(exit_code_of(error), repr(error))
        raise
    lock.release(EXIT_DONE)


def _acquire_all(folders: Mapping[str, StorageFolder]) -> list[Lease | RemoteLease]:
    """Acquire a lease on every folder, or on none.

    Of two jobs that start at once, only the holder of the first folder asks for the others.
    """
    key_by_folder: dict[Path | str, str] = {}
    for key, folder in folders.items():  # two keys may name the same folder
        place = Path(os.path.realpath(folder.path)) if folder.local else str(folder)
        key_by_folder.setdefault(place, key)
    leases: list[Lease | RemoteLease] = []
    dead = set[Process]()
    try:
        for entry in key_by_folder.items():
            leases.append(_acquire(*entry, dead))
    except BaseException:
        for lease in leases:
            lease.close()
        raise
    return leases


def _acquire(folder: Path | str, key: str, dead: set[Process]) -> Lease | RemoteLease:
    if isinstance(folder, Path):
        return acquire_lease(folder, key, dead=dead)
    from titanlite.runtime.remote_lease import acquire_remote_lease

    return acquire_remote_lease(StorageFolder(folder), key, dead=dead)
