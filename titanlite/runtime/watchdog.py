"""Heartbeat watchdog: finds dead or hung ranks, names them, and ends all ranks.

With several ranks, each sends its position about once a second (many ranks: less often) through the
launcher's store. A rank reads the heartbeats of the next rank, and those of all ranks once it is
stuck itself. The first rank that finds a problem reports it to all, and all end.

A single rank watches its own main thread, which should never stay in one phase for ten times the
timeout. Disk access, in any thread, has a limit of its own (`time_limit.py`).
"""

from __future__ import annotations

import ctypes
import faulthandler  # one timer in a process: each dump_traceback_later replaces the one before
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from titanlite.distributed.flight_recorder import FlightRecorder
from titanlite.distributed.rank_tree import RankTree
from titanlite.distributed.rendezvous import connect_to_store, explaining_failed_connections
from titanlite.distributed.time_limit import TimeLimit, exit_after
from titanlite.errors import EXIT_RANK_LOST, RankLostError, UserError
from titanlite.runtime.diagnosis import DISK_PHASES, LOST_ANOTHER, PeerDiagnosis
from titanlite.runtime.heartbeat import (
    SILENT_FRACTION,
    HeartbeatExchange,
    RankProgress,
    SuspendAwareTimer,
    Verdict,
)
from titanlite.threads import DeviceThread

SINGLE_RANK_FACTOR = 10  # times the timeout: no other rank waits, so a slow phase is acceptable
DISK_TIMEOUT_SECONDS = 1800.0  # limit on the phases that are as slow as the disk
JOIN_SECONDS = 5  # for the watching thread to end
STACKS_SECONDS = 5  # for writing stacks; the disk may be what hangs
TRACES_SECONDS = 10  # for writing the flight recorder; the GPU, or the disk, may be what hangs
CLEANUP_SECONDS = 30  # for closing files after another rank is lost; as long as torchrun waits


def connect_ranks() -> None:
    """Let gloo connect the ranks, by the first message that they exchange; it has no content."""
    RankTree().broadcast(b"")


class HeartbeatWatchdog:
    """Ends this rank with a reason when it hangs, or when another rank keeps it waiting.

    The main thread reports its position by `set_phase`. It may stay in one phase for
    `timeout_seconds` (a single rank: ten times as long), or for `disk_timeout_seconds` while it
    loads or saves. `start_id` separates the heartbeats of this start from those of earlier ones in
    the same store. `recorder` writes the last collectives before the rank ends.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        folder: Path,
        start_id: str = "",
        disk_timeout_seconds: float = DISK_TIMEOUT_SECONDS,
        recorder: FlightRecorder | None = None,
    ):
        self._progress = RankProgress(rank, world_size, timeout_seconds)
        self._folder, self._start_id = folder, start_id
        self._disk_timeout_seconds, self._recorder = disk_timeout_seconds, recorder
        self._background_limit: Callable[[], TimeLimit | None] = lambda: None
        self._phase_limit: TimeLimit | None = None
        self._main_thread = threading.get_ident()
        self._main_thread_exits = False  # True also while it looks for a lost rank
        self._closed = threading.Event()
        self._exchange: HeartbeatExchange | None = None

    def __enter__(self) -> HeartbeatWatchdog:
        watch = self._watch_single_rank
        if (world_size := self._progress.world_size) > 1:
            watch = self._watch_peers
            rank, seconds = self._progress.rank, 2 * self._progress.timeout_seconds
            with (  # gloo ignores its timeout while it connects to a frozen rank
                exit_after(seconds, f"rank {rank}: connecting to the other ranks"),
                explaining_failed_connections(rank, world_size),
            ):
                store = connect_to_store(min(self._progress.timeout_seconds, 30))
                connect_ranks()
            store = dist.PrefixStore(f"watch/{self._start_id}", store)
            self._exchange = HeartbeatExchange(store, self._progress)
        self._thread = DeviceThread(watch, "watchdog")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave; raise RankLostError in place of an error that the loss of another rank caused."""
        if lost := self._leave_if_rank_lost(error):  # of errors outside of attributing_errors
            raise RankLostError(lost) from error
        reason = "done" if kind is None else f"{kind.__name__}: {error}"
        self.leave(reason.split("\n")[0][:200])

    @contextmanager
    def attributing_errors(self) -> Iterator[None]:
        """Raise RankLostError in place of an error that the loss of another rank caused."""
        try:
            yield
        except BaseException as error:
            if lost := self._leave_if_rank_lost(error):
                raise RankLostError(lost) from error
            raise

    def set_phase(self, step: int, phase: str) -> None:
        """Report that the main thread begins a phase; beginning the same one again is progress."""
        self._progress.set_phase(step, phase)

    @property
    def position_text(self) -> str:
        """Step and phase of the main thread, for messages."""
        return str(self._progress.position)

    def set_timeout(self, seconds: float, key: str) -> None:
        """Change the timeout to that of the setting `key`, such as after the first step."""
        self._progress.set_timeout(seconds, key)

    def set_lost_after(self, seconds: float) -> None:
        """Take a rank without heartbeats as lost so early, if the timeout is longer."""
        self._progress.set_lost_after(seconds)

    def set_background_limit(self, get_limit: Callable[[], TimeLimit | None]) -> None:
        """While background work has a limit, check that limit instead of the main thread's.

        The main thread may be waiting for that work.
        """
        self._background_limit = get_limit

    def leave(self, reason: str = "done") -> None:
        """Report that this rank exits by itself, and why, so that it is not declared dead."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(JOIN_SECONDS)
            if self._exchange:
                self._exchange.close(reason)
            faulthandler.cancel_dump_traceback_later()

    def _leave_if_rank_lost(self, error: BaseException | None) -> str:
        """If a lost rank caused `error`, report it and leave; returns what happened, or "".

        Takes several heartbeat intervals, because only missing heartbeats show that a rank is dead.
        One rank prints the result. If a lost rank is found, this rank leaves, and its process is
        ended if it still runs `CLEANUP_SECONDS` later.
        """
        if self._exchange is None or self._closed.is_set() or not is_communication_error(error):
            return ""
        verdict = self._await_verdict(self._exchange)
        if verdict is None:
            return ""
        self.leave(LOST_ANOTHER)
        faulthandler.dump_traceback_later(CLEANUP_SECONDS, exit=True, file=2)
        self._report(verdict, "".join(traceback.format_exception(error)))
        self._write_traces(verdict)  # sets a limit of its own, in place of the one above
        faulthandler.dump_traceback_later(CLEANUP_SECONDS, exit=True, file=2)
        return verdict.problem

    def _await_verdict(self, exchange: HeartbeatExchange) -> Verdict | None:
        """Read all heartbeats for five rounds, and agree with the other ranks on who is lost."""
        self._main_thread_exits = True
        exchange.read_all_ranks(True)
        interval = self._progress.heartbeat_seconds
        first_round, deadline = exchange.rounds, time.monotonic() + 10 * interval
        while (
            not exchange.verdict
            and exchange.rounds < first_round + 5
            and time.monotonic() < deadline
        ):
            time.sleep(interval / 4)
        diagnosis, answered = PeerDiagnosis(exchange, self._progress), exchange.rounds > first_round
        finding = diagnosis.find_lost_rank() if answered else diagnosis.describe_silent_store()
        exchange.report(finding)
        while finding and not exchange.verdict and time.monotonic() < deadline:
            time.sleep(interval / 4)
        own_verdict = Verdict(self._progress.rank, finding) if finding else None
        verdict = exchange.verdict or own_verdict
        self._main_thread_exits = verdict is not None
        exchange.read_all_ranks(False)
        return verdict

    def _intervals(self) -> Iterator[float]:
        """Once per heartbeat interval: update the phase and its limit, postpone the dump of the
        stacks, and yield the seconds passed, until this rank leaves.
        """
        timer = SuspendAwareTimer()
        while not self._closed.wait(self._progress.heartbeat_seconds):
            passed = timer.lap(self._progress.heartbeat_seconds)
            if position := self._progress.update_stuck_seconds(passed):
                self._phase_limit = self._new_phase_limit(position.step, position.phase)
            # Each interval postpones the dump, so it happens only if this thread is blocked too,
            # for example by a thread that holds the GIL while it reads a mapped file on a disk that
            # hangs. faulthandler dumps from C, without the GIL.
            dump_seconds = SILENT_FRACTION * self._progress.timeout_seconds
            faulthandler.dump_traceback_later(dump_seconds, file=2)
            yield passed

    def _watch_single_rank(self) -> None:
        for passed in self._intervals():
            if problem := self._check_limits(passed):
                self._end(Verdict(self._progress.rank, problem))

    def _watch_peers(self) -> None:
        exchange, progress = self._exchange, self._progress
        assert exchange is not None  # created with this thread
        diagnosis = PeerDiagnosis(exchange, progress)
        for passed in self._intervals():
            own_problem = self._check_limits(passed)
            diagnosis.update_store_silence(passed)
            if self._main_thread_exits:
                continue
            if exchange.verdict:
                self._end(exchange.verdict)
            exchange.report(exchange.finding or own_problem or diagnosis.find_problem())
            store_is_silent = diagnosis.store_silent_seconds > 3 * progress.heartbeat_seconds
            if exchange.finding and store_is_silent:  # no other rank can receive the finding
                self._end(Verdict(progress.rank, exchange.finding))

    def _new_phase_limit(self, step: int, phase: str) -> TimeLimit | None:
        """The limit on a phase of the main thread in which no other rank would notice a hang."""
        progress = self._progress
        work, thread = f"Rank {progress.rank}: {phase} of step {step}", self._main_thread
        if phase in DISK_PHASES:
            key = "checkpoint.timeout_seconds"
            return TimeLimit(work, self._disk_timeout_seconds, key, thread)
        if progress.world_size == 1:
            seconds = SINGLE_RANK_FACTOR * progress.timeout_seconds
            return TimeLimit(
                work, seconds, f"{SINGLE_RANK_FACTOR} * {progress.timeout_key}", thread
            )
        return None

    def _check_limits(self, passed: float) -> str:
        """What hangs, or "": the background work if it has a limit, or else the main thread."""
        limit = self._background_limit() or self._phase_limit
        if limit is None:
            return ""
        # Work that began after the last check has taken less than `passed` seconds.
        return limit.check(min(passed, time.monotonic() - limit.began))

    def _end(self, verdict: Verdict) -> NoReturn:
        """End this process, whatever its main thread is doing."""
        # If writing the report hangs, faulthandler exits with code 1, which is EXIT_RANK_LOST.
        faulthandler.dump_traceback_later(STACKS_SECONDS, exit=True, file=2)
        self._report(verdict, format_all_stacks())
        self._write_traces(verdict)
        faulthandler.cancel_dump_traceback_later()
        if self._progress.world_size > 1:
            # The launcher ends all ranks when one exits; each needs time to write its own files.
            time.sleep(2 * self._progress.heartbeat_seconds)
        os._exit(EXIT_RANK_LOST)

    def _report(self, verdict: Verdict, stacks: str) -> None:
        """Print the problem, on the rank that found it, and write this rank's stacks to a file."""
        rank, folder = self._progress.rank, self._folder / "stacks"
        if verdict.finder == rank:
            text = f"titanlite: {verdict.problem}\n  stacks of each rank: {folder}/rank_*.txt"
            _print_error(text)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = f"{verdict.problem}\n\nrank {rank} in {self.position_text}:\n{stacks}"
            (folder / f"rank_{rank}.txt").write_text(text, encoding="utf-8")
        except OSError as error:
            _print_error(f"rank {rank}: stacks could not be written: {error}")

    def _write_traces(self, verdict: Verdict) -> None:
        """Write the last collectives within `TRACES_SECONDS`, or end; the finder prints where."""
        rank = self._progress.rank
        if self._recorder is None or self._progress.world_size == 1:
            return
        faulthandler.dump_traceback_later(TRACES_SECONDS, exit=True, file=2)
        try:
            folders = self._recorder.write(rank)
        except Exception as error:  # whatever it is, this rank must end
            _print_error(f"rank {rank}: the last collectives could not be written: {error}")
            return
        if verdict.finder == rank:
            for folder in folders:
                _print_error(f"  last collectives of each rank, to compare: torchfrtrace {folder}")


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_communication_error(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, comes from communication with other ranks."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_when_launcher_dies() -> None:
    """Have the kernel send this process SIGTERM when torchrun ends for any reason; Linux only."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher, parent_death_signal = os.getppid(), 1  # prctl.h's PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if os.getppid() != launcher:  # the launcher ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


def end_launcher() -> None:
    """End the torchrun of this machine, which would start the ranks again; local rank 0 does it."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") == "0":
        os.kill(os.getppid(), signal.SIGTERM)


def format_all_stacks() -> str:
    """The stack of every thread, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    return "\n".join(
        f"{names.get(thread, thread)}:\n{''.join(traceback.format_stack(frames[thread]))}"
        for thread in sorted(frames, key=lambda thread: thread != main)
    )
