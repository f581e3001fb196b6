"""Holding the folder of a run: nobody else writes there, and its starts are written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from titanlite.checkpoint.ledger import Ledger
from titanlite.checkpoint.lease import Lease, take_lease
from titanlite.distributed.collectives import on_rank_0
from titanlite.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_LOST, UserError


class Hold:
    """One rank's part in holding a folder; rank 0 does it for all."""

    def __init__(self, folder: Path):
        self.folder, self.code = folder, EXIT_DONE
        self.lease: Lease | None = None
        self._ledger: Ledger | None = None
        self.step: Callable[[], int] = lambda: 0  # how far the run is

    @property
    def lost(self) -> str:
        """How the folder was lost to another job, if it was; only rank 0 knows."""
        return self.lease.lost if self.lease else ""

    def begin(self, ranks: int, from_step: int, max_crashes: int) -> None:
        """Write the start down, or raise CheckpointError on every rank if it only ever died.

        As early as it is known from where the run goes on: what comes next may be what kills it.
        """

        def write() -> None:
            ledger = Ledger(self.folder)
            ledger.check(from_step, max_crashes)
            ledger.start(ranks, from_step)
            self._ledger = ledger

        on_rank_0(write)

    def stopped_in_this_launch(self) -> bool:
        """Whether this is torchrun's restart of a run that was asked to stop, and did."""
        return on_rank_0(lambda: Ledger(self.folder).stopped_in_this_launch())

    def end(self, code: int, reason: str = "") -> None:
        """Give the folder back, having written down how the run ended."""
        if self._ledger:
            self._ledger.end(code, self.step(), reason)
        if self.lease:
            self.lease.close()


@contextmanager
def hold_folder(folder: Path) -> Iterator[Hold]:
    """Hold a run's folder for one job; raises ConfigError on every rank where another one has it.

    The block sets `code` where it ends otherwise than done.
    """
    hold = Hold(folder)

    def take() -> None:
        hold.lease = take_lease(folder)

    on_rank_0(take)
    try:
        yield hold
    except BaseException as error:
        known = {KeyboardInterrupt: EXIT_INTERRUPTED}.get(type(error), EXIT_LOST)
        hold.end(error.code if isinstance(error, UserError) else known, repr(error))
        raise
    hold.end(hold.code)
