"""Heartbeats of ranks, and their exchange through the launcher's store."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import astuple
from typing import NamedTuple

import torch.distributed as dist

from titanlite.runtime.lease import Process, current_process, is_process_alive
from titanlite.threads import DeviceThread

RANKS_PER_SECOND = 1000  # load limit of the store; with more ranks, each sends less often
SILENT_FRACTION = 0.8  # of the timeout: a rank without heartbeats, or a store without answers
CLOSE_SECONDS = 5.0  # for sending the last heartbeat; the store may not answer


class Position(NamedTuple):
    """Where the main thread of a rank is."""

    step: int
    phases_begun: int  # earlier in this step: shows which rank is ahead, since phases repeat
    phase: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class Heartbeat(NamedTuple):
    """What a rank reports about itself; sent as a JSON list in this order."""

    beat: int  # counts up
    step: int
    phases_begun: int
    phase: str
    seconds: float  # in this phase
    host: str  # this and the next four: of its `Process`
    boot: str
    processes: int | None
    pid: int
    process_started: int | None
    left: str = ""  # why the rank exited; empty while it runs

    @property
    def position(self) -> Position:
        return Position(self.step, self.phases_begun, self.phase)

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process has ended; False if that cannot be known from here."""
        process = Process(self.host, self.boot, self.processes, self.pid, self.process_started)
        return is_process_alive(process) is False


class Verdict(NamedTuple):
    """The problem that ends all ranks, and the rank that found it first."""

    finder: int
    problem: str


class RankProgress:
    """The state of a rank: the phase of its main thread, and how long that phase may last.

    The main thread writes the position; the watchdog's threads read it.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float):
        self.rank, self.world_size = rank, world_size
        self._lost_after_seconds = math.inf
        self.timeout_seconds, self.timeout_key = timeout_seconds, "comm.init_timeout_seconds"
        self.position = Position(0, 0, "start")  # replaced as one object: never read half-changed
        self.stuck_seconds = 0.0  # since the position last changed
        self._seen: Position | None = None
        self._process = astuple(current_process())

    @property
    def silent_limit(self) -> float:
        """Seconds without heartbeats of a rank, or answers of the store, after which it is lost."""
        lost_after = max(self._lost_after_seconds, 3 * self.heartbeat_seconds)
        return min(SILENT_FRACTION * self.timeout_seconds, lost_after)

    @property
    def heartbeat_seconds(self) -> float:
        """Interval between two heartbeats of a rank."""
        return min(max(1.0, self.world_size / RANKS_PER_SECOND), self.timeout_seconds / 20)

    def set_phase(self, step: int, phase: str) -> None:
        """Begin a phase; beginning the same one again is progress too."""
        before = self.position
        phases_begun = before.phases_begun + 1 if step == before.step else 0
        self.position = Position(step, phases_begun, phase)

    def set_timeout(self, seconds: float, key: str) -> None:
        """Use the timeout of the setting `key` from now on."""
        self.timeout_seconds, self.timeout_key = seconds, key

    def set_lost_after(self, seconds: float) -> None:
        """Lower `silent_limit` to this, or to three heartbeats of many ranks."""
        self._lost_after_seconds = seconds

    def update_stuck_seconds(self, passed: float) -> Position | None:
        """Count the seconds without a new position, or return the new one."""
        position = self.position
        if position is self._seen:
            self.stuck_seconds += passed
            return None
        self._seen, self.stuck_seconds = position, 0.0
        return position

    def heartbeat(self, beat: int, left: str = "") -> Heartbeat:
        seconds = round(self.stuck_seconds, 1)
        return Heartbeat._make((beat, *self.position, seconds, *self._process, left))


class SuspendAwareTimer:
    """Time between two laps, without the time in which this process itself was suspended.

    So a job that is suspended and resumed as a whole does not report a lost rank.
    """

    def __init__(self) -> None:
        self._last_lap = time.monotonic()

    def lap(self, interval_seconds: float) -> float:
        """Seconds since the last lap, at most twice the interval at which it is called."""
        before, self._last_lap = self._last_lap, time.monotonic()
        return min(self._last_lap - before, 2 * interval_seconds)


class HeartbeatExchange:
    """Writes this rank's heartbeat into the store and reads those of others.

    Calls to a store can block forever, so they run in a thread of their own.
    """

    def __init__(self, store: dist.Store, progress: RankProgress):
        self.heartbeats: dict[int, Heartbeat] = {}  # the newest of each rank
        self.silent_seconds: dict[int, float] = {}  # since that heartbeat, of the ranks read last
        self.next_rank = (progress.rank + 1) % progress.world_size  # the rank that is always read
        self.rounds = 0  # number of exchanges that the store has answered
        self.finding = ""  # the problem that this rank found
        self.verdict: Verdict | None = None  # the problem that any rank found first
        self._store, self._progress = store, progress
        self._reads_all = False
        self._leave_reason = ""
        self._wake = threading.Event()
        self._thread = DeviceThread(self._run, "heartbeats")
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether the last round read the heartbeats of all ranks."""
        return len(self.silent_seconds) == self._progress.world_size

    def read_all_ranks(self, enable: bool) -> None:
        """Read the heartbeats of all ranks from now on, not only of the next rank."""
        if enable and not self._reads_all:
            self._wake.set()
        self._reads_all = enable

    def report(self, finding: str) -> None:
        """Send a problem to all ranks, unless another rank has already sent one; "": no problem."""
        self.finding = finding
        if finding:
            self._wake.set()

    def close(self, reason: str) -> None:
        """Send a last heartbeat with the reason for leaving, if the store answers."""
        self._leave_reason = reason
        self._wake.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        timer, reason = SuspendAwareTimer(), ""
        try:
            while not reason:
                reason = self._leave_reason
                passed = timer.lap(self._progress.heartbeat_seconds)
                heartbeat = self._progress.heartbeat(self.rounds, reason)
                self._store.set(str(self._progress.rank), json.dumps(heartbeat))
                self._read_verdict()
                if not self.verdict:  # a verdict ends all ranks, so none needs more heartbeats
                    self._read_heartbeats(passed)
                self.rounds += 1
                if not reason:
                    self._wake.wait(self._progress.heartbeat_seconds)
                    self._wake.clear()
        except RuntimeError:
            pass  # a broken connection stays broken; the watchdog sees that `rounds` stops

    def _read_heartbeats(self, passed: float) -> None:
        every_rank = list(range(self._progress.world_size))
        ranks = every_rank if self._reads_all else [self.next_rank]
        silent_seconds: dict[int, float] = {}
        for rank, text in zip(ranks, self._read([str(rank) for rank in ranks]), strict=True):
            known = self.heartbeats.get(rank)
            heartbeat = Heartbeat(*json.loads(text)) if text else None
            same = heartbeat == known and rank in self.silent_seconds
            silent_seconds[rank] = self.silent_seconds[rank] + passed if same else 0.0
            if heartbeat:
                self.heartbeats[rank] = heartbeat
                if heartbeat.left and rank == self.next_rank:
                    self.next_rank = (rank + 1) % self._progress.world_size
        self.silent_seconds = silent_seconds

    def _read_verdict(self) -> None:
        """Read the problem that was found first, after offering the one that this rank found."""
        if self.finding:
            own = json.dumps([self._progress.rank, self.finding])
            text = self._store.compare_set("verdict", "", own).decode()
        else:
            text = self._read(["verdict"])[0]
        self.verdict = Verdict(*json.loads(text)) if text else None

    def _read(self, keys: list[str]) -> list[str]:
        """The values of these keys; "" where there is none."""
        if self._store.check(keys):  # reading a missing key would wait for it
            values = self._store.multi_get(keys)
        elif len(keys) == 1:
            values = [b""]
        else:
            values = [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        return [value.decode() for value in values]
