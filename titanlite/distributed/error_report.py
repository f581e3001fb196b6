"""Print the error that ends a rank, before teardown can block, and find its exit code."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from titanlite.distributed.rendezvous import launched_rank_and_world_size
from titanlite.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_RANK_LOST,
    RankLostError,
    UserError,
    format_error,
)

_PRINTED_KEY = "rank 0 has printed the error"
RANK_0_SECONDS = 30  # more than torchrun needs to end the others after rank 0 exits


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    if isinstance(error, UserError):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_RANK_LOST if isinstance(error, RankLostError) else EXIT_BUG


class ErrorReport:
    """Prints the error that ends this rank, once.

    That comes first: to leave the process group can block, and lets the launcher end other ranks.
    """

    def __init__(self) -> None:
        self._rank, self._world_size = launched_rank_and_world_size()
        self._printed: BaseException | None = None

    @contextmanager
    def printing_errors(self) -> Iterator[None]:
        """Print an error of the block, on rank 0 only if all ranks have it, and raise it again."""
        try:
            yield
        except BaseException as error:
            self._print(error, names_rank=self._world_size > 1)
            raise

    def wait_for_rank_0(self, error: BaseException, store: dist.Store) -> None:
        """Wait until rank 0 has printed an error that all ranks have.

        The launcher ends all ranks when it sees the first exit, so rank 0 must print before any
        rank exits. A store on a frozen host ignores the timeout.
        """
        if not isinstance(error, UserError) or not error.on_all_ranks:
            return
        try:
            if self._rank == 0:
                store.set(_PRINTED_KEY, "")
            else:
                store.wait([_PRINTED_KEY], timedelta(seconds=RANK_0_SECONDS))
        except dist.DistError as lost:  # the launcher or rank 0 has ended, or does not answer
            if isinstance(lost, dist.DistStoreError):  # better two copies than none
                self._print(error, names_rank=True, always=True)
        self._printed = error

    def finish(self, error: BaseException) -> int:
        """Print an error unless it has been printed; returns the exit code.

        Before ranks have joined, none knows whether the others have the error too. So ranks other
        than 0 wait for the launcher to end them, because it acts on the first exit it sees.
        A rank that still runs after `RANK_0_SECONDS` is the only one with the error, and prints it.
        """
        if isinstance(error, UserError) and error is not self._printed and self._rank:
            try:
                time.sleep(RANK_0_SECONDS)
            except KeyboardInterrupt:  # of a launcher, or of Ctrl-C
                return EXIT_INTERRUPTED
        self._print(error, names_rank=self._rank > 0)
        return exit_code_of(error)

    def _print(self, error: BaseException, names_rank: bool, always: bool = False) -> None:
        """Print an error in one write, because the ranks share stderr; of a bug, the traceback."""
        if error is self._printed:
            return
        if isinstance(error, UserError):
            if error.on_all_ranks and self._rank and not always:
                return
            head = f"rank {self._rank}: " if names_rank and not error.on_all_ranks else ""
            text = f"{head}{format_error(error)}\n"
        elif isinstance(error, Exception) and not isinstance(error, RankLostError):
            lines = traceback.format_exception(error)
            text = f"rank {self._rank} of {self._world_size}:\n{''.join(lines)}"
        else:  # an interrupt, or an error that the watchdog has printed
            return
        self._printed = error
        with suppress(OSError):  # whoever read stderr may be gone
            print(text, end="", file=sys.stderr, flush=True)
