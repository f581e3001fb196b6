"""Holding the folders of a run: nobody else writes there, and its starts are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from titanlite.distributed.collectives import run_on_rank_0
from titanlite.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RANK_LOST, CheckpointError, UserError
from titanlite.runtime.lease import Lease, acquire_lease
from titanlite.runtime.remote_lease import RemoteLease, acquire_remote_lease
from titanlite.runtime.start_log import StartLog
from titanlite.storage import StorageFolder


class RunFolderLock:
    """One rank's part in holding the folders; rank 0 does it for all."""

    def __init__(self, folder: Path):
        self.folder, self.code = folder, EXIT_DONE
        self.leases: list[Lease | RemoteLease] = []
        self._ledger: StartLog | None = None
        self.step: Callable[[], int] = lambda: 0  # how far the run is

    @property
    def lost(self) -> str:
        """How a folder was lost to another job, if one was; only rank 0 knows."""
        return next((lease.lost for lease in self.leases if lease.lost), "")

    def check(self) -> int:
        """Read the leases again, on rank 0; returns the number of the last one.

        Raises CheckpointError where a folder is another job's by now. To be called immediately
        before whatever must not reach a folder that another job holds.
        """
        for lease in self.leases:
            lease.check()
        return self.leases[-1].number if self.leases else 0

    def begin(self, ranks: int, from_step: int, max_crashes: int) -> None:
        """Write the start down, or raise CheckpointError on every rank if it only ever died.

        As early as it is known from where the run goes on: what comes next may be what kills it.
        """

        def write() -> None:
            ledger = StartLog(self.folder)
            ledger.check_crash_loop(from_step, max_crashes)
            self.check()
            ledger.record_start(ranks, from_step)
            self._ledger = ledger

        run_on_rank_0(write)

    def stopped_in_this_launch(self) -> bool:
        """Whether this is torchrun's restart of a run that was asked to stop, and did."""
        return run_on_rank_0(lambda: StartLog(self.folder).stopped_in_this_launch())

    def end(self, code: int, reason: str = "") -> None:
        """Give the folders back, having written down how the run ended."""
        if self._ledger and self._still_holds():  # else it would be the end of another job's start
            self._ledger.record_end(code, self.step(), reason)
        for lease in self.leases:
            lease.close()

    def _still_holds(self) -> bool:
        try:
            self.check()
        except CheckpointError:
            return False
        return True


@contextmanager
def lock_run_folders(folder: Path, others: Mapping[str, StorageFolder]) -> Iterator[RunFolderLock]:
    """Hold a run's folder and the `others` it writes to, by the keys that name them, for one job.

    Raises ConfigError on every rank where another job has one. The block sets `code` where it ends
    otherwise than done.
    """
    hold = RunFolderLock(folder)

    def take() -> None:
        hold.leases = _take_all({"job.dump_folder": folder, **others})

    run_on_rank_0(take)
    try:
        yield hold
    except BaseException as error:
        known = {KeyboardInterrupt: EXIT_INTERRUPTED}.get(type(error), EXIT_RANK_LOST)
        hold.end(error.code if isinstance(error, UserError) else known, repr(error))
        raise
    hold.end(hold.code)


def _take_all(folders: Mapping[str, Path | StorageFolder]) -> list[Lease | RemoteLease]:
    """A lease on each, or on none; together, because each may watch a heartbeat for a while."""
    key_by_folder: dict[Path | str, str] = {}
    for key, folder in folders.items():
        key_by_folder.setdefault(_locate(folder), key)  # two keys may name one folder
    with ThreadPoolExecutor(len(key_by_folder)) as pool:
        taking = [pool.submit(_take, *entry) for entry in key_by_folder.items()]
    errors = [error for one in taking if (error := one.exception())]
    if errors:
        for one in taking:
            if not one.exception():
                one.result().close()
        raise errors[0]
    return [one.result() for one in taking]


def _locate(folder: Path | StorageFolder) -> Path | str:
    """The one local path of a folder, or its URL."""
    if isinstance(folder, StorageFolder) and not folder.local:
        return folder.said
    return Path(folder if isinstance(folder, Path) else folder.path).resolve()


def _take(folder: Path | str, key: str) -> Lease | RemoteLease:
    if isinstance(folder, Path):
        return acquire_lease(folder, key)
    return acquire_remote_lease(StorageFolder(folder), key)
