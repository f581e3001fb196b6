"""Noticing that a rank died or hangs: which one, where it stood, and an end for all.

A rank that is alone watches its own main thread, which nothing but a hang keeps in one place for
ten times the timeout. Work that takes what a disk takes, in whatever thread, has a limit of its
own (`limits.py`).

Of several, every rank says once a second, in the launcher's store, where it is. It listens to the next rank,
and to all of them once it gets nowhere itself. Who finds out what is wrong tells all, and all end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from titanlite.distributed.rendezvous import connect_to_store
from titanlite.distributed.signed_store import SignedStore, share_secret
from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import EXIT_RANK_LOST, RankLostError, UserError

RANKS_A_SECOND = 1000  # pulses that a store does not notice; more ranks have a slower pulse
SILENT = 0.8  # of the timeout: who says nothing for so long is given up
STUCK = 0.85  # of the timeout: who stands for so long looks for whom it waits
ALONE = 10  # times the timeout: nobody waits for a rank that is alone, so it may be slow
UNHURRIED = ("load", "save")  # phases that take what the disk takes
DISK_SECONDS = 1800.0  # and the limit on these
END_SECONDS = 5  # for writing stacks, to a disk that may itself be what hangs
LEAVE_SECONDS = 30  # for closing files after another rank is lost; torchrun waits no longer either
LOST = "lost another"  # a reason for leaving that is not the reason of anyone else


class Heartbeat(NamedTuple):
    """What a rank says of itself."""

    beat: int  # one more each time
    step: int
    moves: int  # phases begun in this step: how far a rank is, where phases take turns
    phase: str
    seconds: float  # in this phase
    pid: int
    host: str
    home: str  # where `pid` means the same process; empty if unknown
    left: str = ""  # why it is here no more

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"


class HeartbeatWatchdog:
    """Ends this rank, and says why, when another one keeps it waiting for `timeout_seconds`, or it hangs.

    The main thread says where it is by `set_phase`; it may load and save for `disk_timeout_seconds`. A
    store that outlives the ranks needs a `start_id` of this start of them.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        folder: Path,
        start_id: str = "",
        disk_timeout_seconds: float = DISK_SECONDS,
    ):
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self.timeout_seconds, self.disk_timeout_seconds = timeout_seconds, disk_timeout_seconds
        self.start_id = start_id
        self._key = "comm.init_timeout_seconds"
        self._limit_aside: Callable[[], TimeLimit | None] = lambda: None
        self._main_thread = threading.get_ident()
        self._place = (0, 0, "start")  # step, moves, phase: one object, so always read whole
        self._stuck = self._mute = 0.0  # seconds since we moved, since the store answered
        self._lost = False  # the main thread knows, and ends by itself
        self._over = threading.Event()
        self._line: _Line | None = None

    def __enter__(self) -> HeartbeatWatchdog:
        if self.world_size > 1:
            store = connect_to_store(min(self.timeout_seconds, 30))
            store = dist.PrefixStore(f"watch/{self.start_id}", store)
            store = SignedStore(store, self.start_id, share_secret())
            self._line = _Line(
                store, self.rank, self.world_size, self._pulse, self.heartbeat_seconds
            )
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave; raises RankLost in place of an error that another rank's end has brought about."""
        if lost := self.find_lost_rank(error):
            raise RankLostError(lost) from error
        self.leave("done" if error is None else f"{kind.__name__}: {error}".split("\n")[0][:200])

    @contextmanager
    def attributing_errors(self) -> Iterator[None]:
        """Raise RankLost in place of an error that another rank's end has brought about."""
        try:
            yield
        except BaseException as error:
            if lost := self.find_lost_rank(error):
                raise RankLostError(lost) from error
            raise

    def set_phase(self, step: int, phase: str) -> None:
        """The main thread begins a phase; to begin the same one again is progress too."""
        before, moves, _ = self._place
        self._place = (step, moves + 1 if step == before else 0, phase)

    @property
    def position(self) -> str:
        """Where the main thread is, in words."""
        step, _, phase = self._place
        return f"step {step}, {phase}"

    def set_timeout(self, seconds: float) -> None:
        """Be patient for `seconds` from now on: the first step is behind us."""
        self.timeout_seconds, self._key = seconds, "comm.train_timeout_seconds"

    def watch_limit(self, limit: Callable[[], TimeLimit | None]) -> None:
        """Check a limit too, while there is one: on work that the main thread may wait for."""
        self._limit_aside = limit

    def heartbeat_seconds(self) -> float:
        """How often a rank says where it is."""
        return min(max(1.0, self.world_size / RANKS_A_SECOND), self.timeout_seconds / 20)

    def leave(self, reason: str = "done") -> None:
        """Say that this rank ends in order, and why, so that nobody takes it for dead."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join(END_SECONDS)
            if self._line:
                self._line.hang_up(reason)
            faulthandler.cancel_dump_traceback_later()

    def find_lost_rank(self, error: BaseException | None) -> str:
        """Which rank made `error`, a failed collective, by dying or leaving; "" if none did.

        Takes some pulses, because only one that stays away tells; one rank prints what is found.
        This rank has then left, and is ended should it still be here `LEAVE_SECONDS` later.
        """
        line, pulse = self._line, self.heartbeat_seconds()
        if line is None or self._over.is_set() or not comes_from_others(error):
            return ""
        self._lost = line.wide = True
        before, deadline = line.rounds, time.monotonic() + 10 * pulse
        while not line.verdict and line.rounds < before + 5 and time.monotonic() < deadline:
            time.sleep(pulse / 4)
        finding = self._who_is_gone() if line.rounds > before else self._no_store()
        line.tell(finding)
        while finding and not line.verdict and time.monotonic() < deadline:
            time.sleep(pulse / 4)
        finder, verdict = line.verdict or (self.rank, finding)
        self._lost = line.wide = bool(verdict)
        if verdict:
            self.leave(LOST)
            faulthandler.dump_traceback_later(LEAVE_SECONDS, exit=True, file=2)
            self._print(finder, verdict, "".join(traceback.format_exception(error)))
        return verdict

    def _pulse(self, beat: int, left: str) -> Heartbeat:
        who = (os.getpid(), socket.gethostname(), HOME)
        return Heartbeat(beat, *self._place, round(self._stuck, 1), *who, left)

    def _watch(self) -> None:
        line, place, rounds, before = self._line, None, 0, time.monotonic()
        while not self._over.wait(self.heartbeat_seconds()):
            passed, before = _awake(before, self.heartbeat_seconds())
            if self._place is not place:
                place, self._stuck = self._place, 0.0
                limit = self._limit_of(*place)
            else:
                self._stuck += passed
            # From C, since who reads a mapped file on a disk that hangs holds Python's lock.
            faulthandler.dump_traceback_later(SILENT * self.timeout_seconds, file=2)
            hangs = self._check(limit, passed)
            if line is None:
                if hangs:
                    self._end(self.rank, hangs)
                continue
            self._mute = self._mute + passed if line.rounds == rounds else 0.0
            rounds = line.rounds
            if self._lost:
                continue
            if line.verdict:
                self._end(*line.verdict)
            line.tell(line.finding or hangs or self._finding())
            if line.finding and self._mute > 3 * self.heartbeat_seconds():  # and nobody hears it
                self._end(self.rank, line.finding)

    def _limit_of(self, step: int, moves: int, phase: str) -> TimeLimit | None:
        """The limit on what the main thread does, where it does not follow from the other ranks."""
        what, thread = f"Rank {self.rank}: {phase} of step {step}", self._main_thread
        if phase in UNHURRIED:
            return TimeLimit(what, self.disk_timeout_seconds, "checkpoint.timeout_seconds", thread)
        if self.world_size == 1:
            return TimeLimit(what, ALONE * self.timeout_seconds, f"{ALONE} * {self._key}", thread)
        return None

    def _check(self, limit: TimeLimit | None, passed: float) -> str:
        """What hangs; where work aside has a limit, that one alone, as the main thread may wait."""
        limit = self._limit_aside() or limit
        if limit is None:
            return ""
        # Work that began after the last check has taken less time than passed since then.
        return limit.check(min(passed, time.monotonic() - limit.began))

    def _finding(self) -> str:
        """What is wrong, in words; nothing while all is well."""
        line, other = self._line, self._line.next
        silence = line.silent.get(other, 0.0)
        if silence > SILENT * self.timeout_seconds:
            return f"{line.name(other)} was not heard of for {silence:.0f} s; {self._last(other)}"
        if silence > 3 * self.heartbeat_seconds() and _ended(line.heard.get(other)):
            return f"{line.name(other)} is gone; {self._last(other)}"
        # One after the other, because a thousand ranks that each listen to a thousand are a load.
        patience = (STUCK + 0.1 * self.rank / self.world_size) * self.timeout_seconds
        line.wide = self._stuck > patience and self._place[2] not in UNHURRIED
        if line.wide and self._mute > SILENT * self.timeout_seconds:
            return self._no_store()
        return self._who_is_behind() if line.wide and len(line.silent) == self.world_size else ""

    def _who_is_behind(self) -> str:
        """Whom all wait for: one that left, or that is behind the others and stands there."""
        line = self._line
        if left := self._who_left():
            return f"{left} Rank {self.rank} has waited for {self._stuck:.0f} s."
        here = {rank: pulse for rank, pulse in line.heard.items() if not pulse.left}
        last = min((pulse.step, pulse.moves) for pulse in here.values())
        behind = {rank: p for rank, p in here.items() if (p.step, p.moves) == last}
        seconds = min(pulse.seconds for pulse in behind.values())
        if seconds < SILENT * self.timeout_seconds or any(
            p.phase in UNHURRIED for p in behind.values()
        ):
            return ""
        stands = f"been in {next(iter(behind.values()))} for {seconds:.0f} s"
        waiting = Counter(str(pulse) for rank, pulse in here.items() if rank not in behind)
        if not waiting:
            return f"All {len(here)} ranks have {stands}: they wait for each other."
        places = "; ".join(f"{count} in {place}" for place, count in waiting.most_common(5))
        return f"{line.name(*behind)} has {stands}; waiting for it: {places}."

    def _who_is_gone(self) -> str:
        """Who died, else who left; known only after listening to all for some pulses."""
        line, long = self._line, 2 * self.heartbeat_seconds()
        silent = [rank for rank, seconds in line.silent.items() if seconds > long]
        silent = [rank for rank in silent if rank not in line.heard or not line.heard[rank].left]
        gone = [rank for rank in silent if _ended(line.heard.get(rank))] or silent
        return f"{line.name(*gone)} is gone; {self._last(gone[0])}" if gone else self._who_left()

    def _who_left(self) -> str:
        """Who left, with an error if there is one."""
        left = {r: p for r, p in self._line.heard.items() if p.left not in ("", LOST)}
        ranks = [rank for rank, pulse in left.items() if pulse.left != "done"] or list(left)
        if not ranks:
            return ""
        return f"{self._line.name(*ranks)} left at {left[ranks[0]]} ({left[ranks[0]].left})."

    def _last(self, rank: int) -> str:
        """Where a rank stood, and where we do: it may have gone on after its last pulse."""
        said, (step, _, phase) = self._line.heard.get(rank, "nothing"), self._place
        return f"the last it said was {said}. Rank {self.rank} is in step {step}, {phase}."

    def _no_store(self) -> str:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return f"The store at {where} does not answer: the launcher, or rank 0, is gone."

    def _end(self, finder: int, verdict: str) -> None:
        """End this process, whatever its main thread is doing."""
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=2)  # by code 1: EXIT_LOST
        self._print(finder, verdict, _stacks())
        os._exit(EXIT_RANK_LOST)

    def _print(self, finder: int, verdict: str, stacks: str) -> None:
        """One rank to stderr, each to its file: a thousand stacks are not for reading in a row."""
        folder, (step, _, phase) = self.folder / "stacks", self._place
        if finder == self.rank:
            words = f"titanlite: {verdict}\n  where each rank stood: {folder}/rank_*.txt"
            print(words, file=sys.stderr, flush=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            words = f"{verdict}\n\nrank {self.rank} in step {step}, {phase}:\n{stacks}"
            (folder / f"rank_{self.rank}.txt").write_text(words, encoding="utf-8")
        except OSError as problem:
            print(f"rank {self.rank}: no stacks written: {problem}", file=sys.stderr, flush=True)


class _Line:
    """The talk with the store, in a thread of its own: a store that is frozen freezes who asks."""

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        ranks: int,
        pulse: Callable[[int, str], Heartbeat],
        heartbeat_seconds: Callable[[], float],
    ):
        self.store = store
        self.rank, self.world_size, self.pulse, self.heartbeat_seconds = (
            rank,
            ranks,
            pulse,
            heartbeat_seconds,
        )
        self.next = (rank + 1) % ranks  # whom we listen to
        self.wide = False  # to everyone, for the moment
        self.heard: dict[int, Heartbeat] = {}  # the last of each rank
        self.silent: dict[int, float] = {}  # seconds since then, of those we listen to
        self.rounds = 0  # in which the store answered
        self.finding = ""  # what this rank found
        self.verdict: tuple[int, str] | None = None  # what was found first, and by whom
        self._reason = ""  # for hanging up
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._talk, name="watch line", daemon=True)
        self._thread.start()

    def tell(self, finding: str) -> None:
        """Let all ranks know, unless there is nothing to know or they know something else."""
        self.finding = finding
        if finding:
            self._wake.set()

    def hang_up(self, reason: str) -> None:
        """Say a last word, if the store listens."""
        self._reason = reason
        self._wake.set()
        self._thread.join(END_SECONDS)

    def name(self, *ranks: int) -> str:
        """Rank 2 (its host and process); of several, the first few."""
        if len(ranks) > 1:
            more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
            return f"Each of ranks {', '.join(map(str, ranks[:8]))}{more}"
        pulse = self.heard.get(ranks[0])
        return f"Rank {ranks[0]}" + (f" ({pulse.host}, process {pulse.pid})" if pulse else "")

    def _talk(self) -> None:
        before, reason = time.monotonic(), ""
        try:
            while not reason:
                reason = self._reason
                passed, before = _awake(before, self.heartbeat_seconds())
                self.store.set(str(self.rank), json.dumps(self.pulse(self.rounds, reason)))
                self._listen(passed)
                self._agree()
                self.rounds += 1
                if not reason:
                    self._wake.wait(self.heartbeat_seconds())
                    self._wake.clear()
        except RuntimeError:
            pass  # a connection that broke stays broken; that no more rounds are made says so

    def _listen(self, passed: float) -> None:
        ranks, silent = (list(range(self.world_size)) if self.wide else [self.next]), {}
        for rank, text in zip(ranks, self.store.read([str(rank) for rank in ranks]), strict=True):
            pulse, known = Heartbeat(*json.loads(text)) if text else None, self.heard.get(rank)
            if known and (pulse is None or pulse.beat < known.beat):
                pulse = known  # forged, or an old one written again: nothing new was heard
            same = pulse == known and rank in self.silent
            silent[rank] = self.silent[rank] + passed if same else 0.0
            if pulse:
                self.heard[rank] = pulse
                if pulse.left and rank == self.next:
                    self.next = (rank + 1) % self.world_size
        self.silent = silent

    def _agree(self) -> None:
        """Learn what was found first; it may be what we found."""
        if self.finding:
            found = self.store.set_first("verdict", json.dumps([self.rank, self.finding]))
        else:
            found = self.store.read(["verdict"])[0]
        self.verdict = tuple(json.loads(found)) if found else None


def comes_from_others(error: BaseException | None) -> bool:
    """Whether an error, or one that it was made of, is about talking with other ranks."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, dist.DistError) or "gloo/" in str(error) or "NCCL" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def exit_with_launcher() -> None:
    """Have the kernel send this process SIGTERM when torchrun ends, however it does; on Linux."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher, parent_death_signal = os.getppid(), 1  # prctl.h's PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)
    if os.getppid() != launcher:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _awake(before: float, heartbeat_seconds: float) -> tuple[float, float]:
    """Seconds since `before`, less those in which we were stopped ourselves; and the time now.

    A job that is stopped as a whole, and later woken, has lost nobody.
    """
    now = time.monotonic()
    return min(now - before, 2 * heartbeat_seconds), now


def _home() -> str:
    """This start of this kernel, and whose process numbers these are; empty off Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


HOME = _home()


def _ended(pulse: Heartbeat | None) -> bool:
    """Whether a rank's process, if it was one of this machine, is known to have ended."""
    if pulse is None or not HOME or pulse.home != HOME:
        return False
    try:
        status = Path(f"/proc/{pulse.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        return isinstance(problem, (FileNotFoundError, ProcessLookupError))
    return status.rpartition(")")[2].split()[0] in "ZX"  # a zombie, or not even that


def _stacks() -> str:
    """Where every thread stands, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = threading.main_thread().ident
    return "\n".join(
        f"{names.get(thread, thread)}:\n{''.join(traceback.format_stack(frames[thread]))}"
        for thread in sorted(frames, key=lambda thread: thread != main)
    )
