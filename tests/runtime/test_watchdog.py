"""A rank that dies or hangs: the others end in time, and say which one and where it stood."""

from __future__ import annotations

import ctypes
import ipaddress
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.conftest import ROOT
from tests.distributed.ranks import PRELOAD
from titanlite.distributed.signed_store import SignedStore
from titanlite.errors import (
    EXIT_DONE,
    EXIT_RANK_LOST,
    EXIT_USER_ERROR,
    ConfigError,
    RankLostError,
    UserError,
)
from titanlite.runtime.watchdog import Heartbeat, HeartbeatWatchdog, _Line

RANKS = 3
TIMEOUT = 4.0
IN_TIME = TIMEOUT + 0.5  # machines that test are busy
EXIT_OTHER = 9  # an error that is nobody else's
THIRD_STEP = 3  # when the trouble comes, on rank 2


class Job:
    """Three ranks that take steps together, in processes of their own, and what became of them."""

    def __init__(self, folder: Path, trouble, port: int, restart: int = 0):
        self.folder, self.ended = folder, {}
        folder.mkdir()
        process, rest = forkserver().Process, (folder, trouble, port, restart)
        self.ranks = [process(target=train, args=(r, *rest), daemon=True) for r in range(RANKS)]
        for process in self.ranks:
            process.start()
        self.clock = threading.Thread(target=self._note_ends, daemon=True)
        self.clock.start()

    def _note_ends(self) -> None:
        running = {process.sentinel: rank for rank, process in enumerate(self.ranks)}
        while running:
            for sentinel in wait(list(running)):
                self.ended[running.pop(sentinel)] = time.time()

    def codes(self, *ranks: int) -> list[int | None]:
        """The exit codes of these ranks, or of all, once they have ended; None where none has."""
        deadline = time.monotonic() + 4 * TIMEOUT
        for rank in ranks or range(RANKS):
            self.ranks[rank].join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.ranks]

    def seconds(self, *ranks: int) -> float:
        """From the trouble until the last of these ranks had ended."""
        time.sleep(0.1)  # for the clock, which may see an end a little later than `codes`
        ends = [self.ended[rank] for rank in ranks or range(RANKS)]
        return max(ends) - (self.folder / "trouble").stat().st_mtime

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def said(self) -> str:
        return "".join((self.folder / f"said_{rank}").read_text() for rank in range(RANKS))

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank_{rank}.txt").read_text()


def forkserver():
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def train(rank: int, folder: Path, trouble, port: int, restart: int) -> None:
    """A trainer in small: the phases of its steps, a collective in some, and what may go wrong."""
    said = os.open(folder / f"said_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), START=str(restart))
    meeting, minute = dist.FileStore(f"{folder}/meeting", RANKS), timedelta(seconds=60)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS, timeout=minute)
    try:
        with HeartbeatWatchdog(rank, RANKS, TIMEOUT, folder, start_id=str(restart)) as watch:
            take_steps(rank, watch, trouble, folder)
    except UserError:
        sys.exit(EXIT_USER_ERROR)
    except RankLostError:
        sys.exit(EXIT_RANK_LOST)
    except RuntimeError:
        sys.exit(EXIT_OTHER)


def take_steps(rank: int, watch: HeartbeatWatchdog, trouble, folder: Path) -> None:
    for step in range(1, 6):
        for phase in ("data", "forward", "backward", "save"):
            watch.set_phase(step, phase)
            if step == THIRD_STEP and phase == trouble.phase:
                time.sleep(0.5)  # the phases of real steps are longer than a pulse
                if rank == 2:
                    (folder / "trouble").touch()
                trouble(rank)
            if phase in ("forward", "backward"):
                dist.all_reduce(torch.ones(1))


TROUBLES = []


def in_phase(phase: str):
    """Trouble that comes in this phase."""

    def mark(trouble):
        trouble.phase = phase
        TROUBLES.append(trouble)
        return trouble

    return mark


@in_phase("data")
def nothing(rank):
    pass


@in_phase("backward")
def frozen(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


@in_phase("forward")
def all_frozen(rank):
    if rank == 2:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGSTOP)


@in_phase("backward")
def killed(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)


@in_phase("backward")
def killed_unnoticed(rank):
    """As under NCCL, whose collectives wait on for who is gone."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@in_phase("data")
def endless_data(rank):
    if rank == 2:
        read_what_never_comes()


def read_what_never_comes():
    while True:
        time.sleep(0.1)


@in_phase("data")
def hung_disk(rank):
    """As for a page of a mapped file: Python's lock is held, so that no thread runs."""
    if rank == 2:
        ctypes.PyDLL(None).sleep(60)


@in_phase("forward")
def deadlock(rank):
    dist.recv(torch.ones(1), src=(rank + 1) % RANKS)


@in_phase("data")
def user_error(rank):
    if rank == 2:
        raise ConfigError("a setting that cannot be")


@in_phase("forward")
def own_mistake(rank):
    raise RuntimeError("gloo/allreduce.cc: shapes differ")


@in_phase("save")
def slow_save(rank):
    if rank == 2:
        time.sleep(1.4 * TIMEOUT)


@in_phase("data")
def outsider(rank):
    """Somebody who reaches the store, but is no rank, writes what ranks would."""
    if rank == 2:
        store = open_as_outsider()
        old = store.get("0")
        for _ in range(8):
            store.set("verdict", '[0, "an outsider says so"]')
            store.set("1", json.dumps([99, 9, 0, "data", 0.0, 1, "host", "home", "ConfigError"]))
            store.set("0", old)
            time.sleep(0.2)  # a pulse


@in_phase("backward")
def killed_after_a_forged_verdict(rank):
    if rank == 2:
        open_as_outsider().set("verdict", b"\xff an outsider says so")
        os.kill(os.getpid(), signal.SIGKILL)


def open_as_outsider() -> dist.Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"watch/{os.environ['START']}", store)


@in_phase("forward")
def frozen_store(rank):
    """The host of the launcher freezes, while nobody gets on."""
    time.sleep(60)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job for each trouble; all at once, since they mostly wait."""
    folder, store = tmp_path_factory.mktemp("watch"), serve()
    troubles = [trouble for trouble in TROUBLES if trouble not in (nothing, frozen_store)]
    started = {
        trouble: Job(folder / trouble.__name__, trouble, store.port, restart)
        for restart, trouble in enumerate(troubles)
    }
    yield started
    for job in started.values():
        job.kill()


def serve() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def serve_elsewhere(connection) -> None:
    store = serve()
    connection.send(store.port)
    time.sleep(60)


def test_the_others_say_where_a_frozen_rank_stood_and_end_in_time(jobs):
    job = jobs[frozen]
    assert job.codes(0, 1) == [EXIT_RANK_LOST, EXIT_RANK_LOST, None]
    assert job.seconds(0, 1) < IN_TIME
    said = job.said()
    assert said.count("Rank 2 (") == said.count("was not heard of for") == 1, said
    assert said.count("the last it said was step 3, backward") == 1, said
    for rank in (0, 1):
        assert "in take_steps" in job.stacks(rank) and "all_reduce" in job.stacks(rank)
        assert f"rank {rank} in step 3, backward" in job.stacks(rank)


def test_a_job_that_was_frozen_as_a_whole_goes_on(jobs):
    job = jobs[all_frozen]
    wait_for(job.folder / "trouble")
    while time.time() < (job.folder / "trouble").stat().st_mtime + 1.5 * TIMEOUT:
        time.sleep(0.1)
    for process in job.ranks:
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # hosts wake one after the other
    assert job.codes() == [EXIT_DONE] * RANKS, job.said()


@pytest.mark.parametrize("trouble", [killed, killed_unnoticed])
def test_a_killed_rank_is_named_soon(jobs, trouble):
    job = jobs[trouble]
    assert job.codes() == [EXIT_RANK_LOST, EXIT_RANK_LOST, -signal.SIGKILL]
    assert job.seconds() < IN_TIME / 2
    said = job.said()
    assert said.count("Rank 2 (") == said.count("titanlite:") == 1, said
    assert "is gone; the last it said was step 3, backward" in said
    assert "in take_steps" in job.stacks(0) and "in take_steps" in job.stacks(1)


def test_a_rank_that_stays_behind_is_named_though_it_lives(jobs):
    job = jobs[endless_data]
    assert job.codes() == [EXIT_RANK_LOST] * RANKS
    assert job.seconds() < IN_TIME
    said = job.said()
    assert said.count("Rank 2 (") == said.count("has been in step 3, data for") == 1, said
    assert "waiting for it: 2 in step 3, forward" in said
    assert "in read_what_never_comes" in job.stacks(2)


def test_a_rank_whose_disk_hangs_shows_where(jobs):
    job = jobs[hung_disk]
    assert job.codes(0, 1) == [EXIT_RANK_LOST, EXIT_RANK_LOST, None]
    assert job.seconds(0, 1) < IN_TIME
    assert "the last it said was step 3, data" in job.said()
    assert "in hung_disk" in job.said()


def test_ranks_that_wait_for_each_other_hear_so(jobs):
    job = jobs[deadlock]
    assert job.codes() == [EXIT_RANK_LOST] * RANKS
    assert job.seconds() < IN_TIME
    assert job.said().count("All 3 ranks have been in step 3, forward for") == 1, job.said()
    assert "in deadlock" in job.stacks(1)


def test_a_rank_that_left_for_a_reason_is_not_taken_for_dead(jobs):
    job = jobs[user_error]
    assert job.codes() == [EXIT_RANK_LOST, EXIT_RANK_LOST, EXIT_USER_ERROR]
    said = job.said()
    assert said.count("left at step 3, data (ConfigError: a setting that cannot be)") == 1, said
    assert "gone" not in said


def test_nobody_is_blamed_for_a_mistake_of_our_own(jobs):
    job = jobs[own_mistake]
    assert EXIT_OTHER in job.codes()  # the others may see the first one leave with it
    assert "gone" not in job.said()


def test_a_save_may_take_longer_than_the_timeout(jobs):
    job = jobs[slow_save]
    assert job.codes() == [EXIT_DONE] * RANKS, job.said()
    assert job.seconds() > 1.3 * TIMEOUT


def test_who_reaches_the_store_cannot_end_a_job_nor_hide_that_a_rank_died(jobs):
    job = jobs[outsider]
    assert job.codes() == [EXIT_DONE] * RANKS, job.said()
    for rank in range(RANKS):
        reported = (job.folder / f"said_{rank}").read_text().count("that no rank has written")
        assert reported == 1, job.said()
    job = jobs[killed_after_a_forged_verdict]
    assert job.codes() == [EXIT_RANK_LOST, EXIT_RANK_LOST, -signal.SIGKILL]
    assert "Rank 2 (" in job.said() and "outsider" not in job.said()


def test_a_signed_value_holds_for_its_key_its_start_and_its_text_only():
    store, secret = dist.HashStore(), bytes(32)
    ours = SignedStore(store, "a", secret)
    ours.set("1", "text")
    signed = store.get("1")
    assert ours.read(["1", "2"]) == ["text", ""]
    assert SignedStore(store, "b", secret).read(["1"]) == [""]
    assert SignedStore(store, "a", bytes(31) + b"1").read(["1"]) == [""]
    for key, value in (("2", signed), ("1", signed + b"s"), ("1", b""), ("1", b"\xff")):
        store.set(key, value)
        assert ours.read([key]) == [""]
    assert ours.set_first("1", "mine") == ours.set_first("1", "late") == "mine"


def test_an_old_pulse_that_is_written_again_is_no_sign_of_life(tmp_path):
    store = SignedStore(dist.HashStore(), "", bytes(32))
    pulses = [Heartbeat(beat, 1, 0, "data", 0.0, 1, "host", "home") for beat in range(3)]
    line = _Line(store, 0, 2, lambda beat, left: pulses[0], lambda: 60.0)
    line.hang_up("done")
    for beat, silent in ((1, 0.0), (2, 0.0), (1, 5.0), (0, 10.0), (2, 15.0)):
        store.set("1", json.dumps(pulses[beat]))
        line._listen(5.0)
        assert line.silent[1] == silent
        assert line.heard[1].beat == min(2, beat if not silent else 2)


def test_a_healthy_job_is_left_alone_also_when_the_store_knows_a_job_that_was_not(tmp_path):
    """As after a restart by torchrun, whose store has the pulses and the verdict of before."""
    store = serve()
    before = Job(tmp_path / "before", killed, store.port)
    assert EXIT_RANK_LOST in before.codes()
    again = Job(tmp_path / "again", nothing, store.port, restart=1)
    assert again.codes() == [EXIT_DONE] * RANKS, again.said()
    assert again.said() == ""


def test_without_an_answer_from_the_store_a_rank_ends_by_itself(tmp_path):
    here, there = multiprocessing.Pipe()
    store = forkserver().Process(target=serve_elsewhere, args=(there,), daemon=True)
    store.start()
    job = Job(tmp_path / "job", frozen_store, here.recv())
    try:
        wait_for(job.folder / "trouble")
        os.kill(store.pid, signal.SIGSTOP)
        assert job.codes() == [EXIT_RANK_LOST] * RANKS
        assert job.seconds() < IN_TIME
        assert "does not answer: the launcher, or rank 0, is gone" in job.said()
        assert "in frozen_store" in job.stacks(1)
    finally:
        store.kill()
        job.kill()


def train_alone(folder: Path) -> None:
    os.dup2(os.open(folder / "said", os.O_CREAT | os.O_WRONLY), 2)
    with HeartbeatWatchdog(0, 1, TIMEOUT / 20, folder) as watch:
        for step in (1, 2):
            watch.set_phase(step, "data")
            time.sleep(TIMEOUT / 10)  # slower than the timeout, at which nobody waits
        read_what_never_comes()


def test_a_rank_that_is_alone_and_hangs_says_where_and_ends(tmp_path):
    process = forkserver().Process(target=train_alone, args=(tmp_path,), daemon=True)
    process.start()
    process.join(4 * TIMEOUT)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == EXIT_RANK_LOST, said
    hangs = "Rank 0: data of step 2 has taken 2 s, and is in read_what_never_comes"
    assert f"titanlite: {hangs}" in said
    assert "The limit is 10 * comm.init_timeout_seconds = 2." in said
    assert "in read_what_never_comes" in (tmp_path / "stacks" / "rank_0.txt").read_text()


WORKER = """
import os, sys, time, torch
from pathlib import Path
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.runtime.watchdog import HeartbeatWatchdog, exit_with_launcher
exit_with_launcher()
folder = Path(sys.argv[1])
with join_process_group(torch.device("cpu"), CommConfig(), DebugConfig(), folder) as session:
    with HeartbeatWatchdog(session.rank, session.world_size, 60, folder, session.start_id):
        (folder / f"pid_{session.rank}").write_text(str(os.getpid()))
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's end")
def test_a_launched_job_listens_on_loopback_only_and_does_not_outlive_its_launcher(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    command = ["bash", str(ROOT / "scripts/launch.sh"), "2", str(script), str(tmp_path)]
    torchrun = subprocess.Popen(command, env=environment)
    pids = [int(wait_for(tmp_path / f"pid_{rank}")) for rank in range(2)]
    time.sleep(0.5)  # nor does one end before its launcher
    assert all(map(runs, pids))
    listening = addresses_of([torchrun.pid, *pids])
    assert len(listening) >= 3  # the store, and gloo in both ranks
    assert all(address.is_loopback for address in listening), listening
    torchrun.kill()
    torchrun.wait()
    deadline = time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def addresses_of(pids: list[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Where these processes listen, from /proc."""
    own = {
        os.readlink(entry)
        for pid in pids
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink()
    }
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:  # LISTEN
                words = bytes.fromhex(local.partition(":")[0])  # of 32 bits, little-endian
                raw = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.append(ipaddress.ip_address(raw))
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path: Path) -> str:
    """What a file says, once it is there."""
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # it may be there before its content
    return path.read_text()
