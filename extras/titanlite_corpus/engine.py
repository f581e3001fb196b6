"""Run functions in parallel processes: the engine of one machine, and what an engine must be."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

from titanlite.errors import DataError
from titanlite.log import logger
from titanlite.threads import DeviceThread

STALL_SECONDS = 600.0
# imported once, not once per worker
_PRELOADED = [__name__, "titanlite_corpus.documents", "titanlite_corpus.task", "titanlite.data"]


@dataclass(frozen=True)
class EngineCall:
    """One call of a function; everything can be pickled."""

    function: Callable[..., Any]  # of module level
    arguments: tuple[Any, ...]
    name: str  # for messages


class TaskEngine(Protocol):
    """Runs calls somewhere, in any order and possibly more than once; keeps no result."""

    def run(self, calls: Sequence[EngineCall]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the call, its result) as calls finish; raises what a call raises."""
        ...


def report_progress() -> None:
    """Called by functions after each document or table, so that a stalled worker is noticed."""
    if _count_progress is not None:
        _count_progress()


def count_progress_with(count: Callable[[], None]) -> None:
    """Let `report_progress` call this; for the processes of an engine."""
    global _count_progress
    _count_progress = count


class LocalEngine:
    """Processes on this machine; with one worker, or for one call, this process itself.

    Raises DataError if a worker is killed, or if no worker reports progress for `stall_seconds`.
    """

    def __init__(self, workers: int | None = None, stall_seconds: float = STALL_SECONDS):
        self._workers = workers or usable_cores()
        self._stall_seconds = stall_seconds

    def run(self, calls: Sequence[EngineCall]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the call, its result) as calls finish; raises what a call raises."""
        workers = min(self._workers, len(calls))
        if workers <= 1:
            for index, call in enumerate(calls):
                yield index, call.function(*call.arguments)
            return
        other_children, context = multiprocessing.active_children(), _process_context()
        # Progress by call: one writer for each count, so that there is no lock which a killed
        # worker could leave locked.
        counts = context.RawArray("Q", len(calls))
        pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(counts,))
        running: dict[Future, int] = {}
        try:
            running = {pool.submit(_run_in_worker, c, n): n for n, c in enumerate(calls)}
            for future in _as_completed(running, lambda: sum(counts), self._stall_seconds):
                yield running.pop(future), future.result()
        except (_Stalled, BrokenProcessPool, KeyboardInterrupt) as error:
            for process in set(multiprocessing.active_children()) - set(other_children):
                process.kill()  # Python would wait for one that is blocked in a read
            if isinstance(error, KeyboardInterrupt):
                raise
            if isinstance(error, _Stalled):
                unfinished = [calls[number] for number in running.values()]
                raise self._stalled_error(unfinished, len(calls)) from None
            raise DataError(
                "a worker was killed, perhaps because memory ran out.",
                fix="Run the same command again with fewer --workers; what is finished is reused.",
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _stalled_error(self, unfinished: Sequence[EngineCall], total: int) -> DataError:
        first = min(call.name for call in unfinished)
        return DataError(
            f"no worker has made progress for {self._stall_seconds:g} s; {len(unfinished)} of"
            f" {total} tasks are not finished, the first is {first}.",
            fix="Check that the disk responds, then run the same command again: what is finished is"
            " reused. --stall-seconds allows more time.",
        )


class _Stalled(Exception):
    """No worker has reported progress within the time limit."""


def _as_completed(
    futures: Iterable[Future], count: Callable[[], int], stall_seconds: float
) -> Iterator[Future]:
    """Yield futures as they finish; raises _Stalled if `count()` is constant for too long."""
    pending, last_count, since, warned = set(futures), count(), time.monotonic(), False
    while pending:
        finished, pending = wait_for_futures(
            pending, timeout=stall_seconds / 20, return_when=FIRST_COMPLETED
        )
        yield from finished
        idle = time.monotonic() - since
        if finished or count() != last_count:
            last_count, since, warned = count(), time.monotonic(), False
        elif idle > stall_seconds:
            raise _Stalled
        elif idle > stall_seconds / 5 and not warned:
            warned = True
            logger.warning(
                "no worker has made progress for %.0f s; the limit is %.0f s", idle, stall_seconds
            )


def _process_context() -> multiprocessing.context.BaseContext:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


_progress_counts: Any = None  # of this worker process; shared with its parent
_count_progress: Callable[[], None] | None = None  # None outside a worker


def _start_worker(counts: Any) -> None:
    global _progress_counts
    _progress_counts = counts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)  # after a kill -9 of the parent, the pool's own pipes would block forever

    DeviceThread(exit_with_parent, "exit with parent").start()


def _run_in_worker(call: EngineCall, number: int) -> Any:
    def count() -> None:
        _progress_counts[number] += 1

    count_progress_with(count)
    return call.function(*call.arguments)


def usable_cores() -> int:
    """Cores that this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
