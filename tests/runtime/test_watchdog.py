"""When a rank dies or hangs, the others end in time, and report which one and its last position."""

from __future__ import annotations

import ctypes
import ipaddress
import math
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

from conftest import HANG_SECONDS, ROOT
from tests.distributed.ranks import PRELOAD
from titanlite.errors import (
    EXIT_DONE,
    EXIT_RANK_LOST,
    EXIT_USER_ERROR,
    ConfigError,
    RankLostError,
    UserError,
)
from titanlite.runtime.watchdog import HeartbeatWatchdog

RANKS = 3
TIMEOUT = 16.0
# A rank stays for two heartbeats until the others have written their files; test machines are busy,
# and may stand still for seconds.
MAX_SECONDS = 2.5 * TIMEOUT
EXIT_OWN_ERROR = 9  # an error that no other rank caused
FAULT_STEP = 3  # when the fault happens, on rank 2


class Job:
    """Three processes, one per rank, that take steps together; records when each one ended."""

    def __init__(self, folder: Path, fault, port: int, restart: int = 0):
        self.folder, self.ended = folder, {}
        folder.mkdir()
        context = forkserver()
        self.ranks = [
            context.Process(target=train, args=(rank, folder, fault, port, restart), daemon=True)
            for rank in range(RANKS)
        ]
        for process in self.ranks:
            process.start()
        threading.Thread(target=self._record_ends, daemon=True).start()

    def _record_ends(self) -> None:
        running = {process.sentinel: rank for rank, process in enumerate(self.ranks)}
        while running:
            for sentinel in wait(list(running)):
                self.ended[running.pop(sentinel)] = time.time()

    def codes(self, *ranks: int) -> list[int | None]:
        """The exit codes of these ranks, or of all, once they have ended; None where none has."""
        deadline = time.monotonic() + HANG_SECONDS
        for rank in ranks or range(RANKS):
            self.ranks[rank].join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self.ranks]

    def seconds(self, *ranks: int) -> float:
        """Seconds from the fault until the last of these ranks had ended."""
        time.sleep(0.1)  # `_record_ends` may see an end a little later than `codes`
        ends = [self.ended[rank] for rank in ranks or range(RANKS)]
        return max(ends) - (self.folder / "fault").stat().st_mtime

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def output(self) -> str:
        return "".join((self.folder / f"output_{rank}").read_text() for rank in range(RANKS))

    def stacks(self, rank: int) -> str:
        return (self.folder / "stacks" / f"rank_{rank}.txt").read_text()


def forkserver():
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def train(rank: int, folder: Path, fault, port: int, restart: int) -> None:
    """A minimal trainer: steps with phases, collectives in two of them, and one fault."""
    output = os.open(folder / f"output_{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), START=str(restart))
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    try:
        timeout, lost_after = (HANG_SECONDS, TIMEOUT) if fault is vanished else (TIMEOUT, math.inf)
        with HeartbeatWatchdog(rank, RANKS, timeout, folder, start_id=str(restart)) as watchdog:
            watchdog.set_lost_after(lost_after)
            take_steps(rank, watchdog, fault, folder)
    except UserError:
        sys.exit(EXIT_USER_ERROR)
    except RankLostError:
        sys.exit(EXIT_RANK_LOST)
    except RuntimeError:
        sys.exit(EXIT_OWN_ERROR)


def take_steps(rank: int, watchdog: HeartbeatWatchdog, fault, folder: Path) -> None:
    for step in range(1, 6):
        for phase in ("data", "forward", "backward", "save"):
            watchdog.set_phase(step, phase)
            if step == FAULT_STEP and phase == fault.phase:
                time.sleep(
                    TIMEOUT / 10
                )  # phases of real steps are longer than two heartbeat intervals
                if rank == 2:
                    (folder / "fault").touch()
                fault(rank)
            if phase in ("forward", "backward"):
                dist.all_reduce(torch.ones(1))


FAULTS = []


def in_phase(phase: str):
    """Register a fault that happens in this phase."""

    def register(fault):
        fault.phase = phase
        FAULTS.append(fault)
        return fault

    return register


@in_phase("data")
def no_fault(rank):
    pass


@in_phase("backward")
def frozen(rank):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


@in_phase("backward")
def vanished(rank):
    """As `frozen`, under a timeout of minutes."""
    frozen(rank)


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
    """As under NCCL, whose collectives keep waiting for a dead rank."""
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@in_phase("data")
def endless_data(rank):
    if rank == 2:
        read_forever()


def read_forever():
    while True:
        time.sleep(0.1)


@in_phase("data")
def hung_disk(rank):
    """As when a page of a mapped file is read: the GIL is held, so no thread runs."""
    if rank == 2:
        ctypes.PyDLL(None).sleep(60)


@in_phase("forward")
def deadlock(rank):
    dist.recv(torch.ones(1), src=(rank + 1) % RANKS)


@in_phase("data")
def user_error(rank):
    if rank == 2:
        raise ConfigError("an invalid setting")


@in_phase("forward")
def own_error(rank):
    raise RuntimeError("gloo/allreduce.cc: shapes differ")


@in_phase("save")
def slow_save(rank):
    if rank == 2:
        time.sleep(1.4 * TIMEOUT)


@in_phase("forward")
def frozen_store(rank):
    """The host of the launcher freezes while all ranks wait."""
    time.sleep(60)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A job for each fault; they run simultaneously, since they mostly wait."""
    folder, store = tmp_path_factory.mktemp("watch"), open_store()
    faults = [fault for fault in FAULTS if fault not in (no_fault, frozen_store)]
    started = {
        fault: Job(folder / fault.__name__, fault, store.port, restart)
        for restart, fault in enumerate(faults)
    }
    yield started
    for job in started.values():
        job.kill()


def open_store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def serve_in_process(connection) -> None:
    store = open_store()
    connection.send(store.port)
    time.sleep(60)


def test_a_frozen_rank_is_reported_with_its_last_position_and_the_others_end_in_time(jobs):
    job = jobs[frozen]
    assert job.codes(0, 1) == [EXIT_RANK_LOST, EXIT_RANK_LOST, None]
    assert job.seconds(0, 1) < MAX_SECONDS
    output = job.output()
    assert output.count("Rank 2 (") == output.count("has sent no heartbeat for") == 1, output
    assert output.count("Last heartbeat of rank 2: step 3, backward") == 1, output
    for rank in (0, 1):
        assert "in take_steps" in job.stacks(rank) and "all_reduce" in job.stacks(rank)
        assert f"rank {rank} in step 3, backward" in job.stacks(rank)


def test_a_rank_on_a_lost_machine_is_reported_long_before_the_timeout(jobs):
    job = jobs[vanished]
    assert job.codes(0, 1) == [EXIT_RANK_LOST, EXIT_RANK_LOST, None]
    assert job.seconds(0, 1) < HANG_SECONDS / 2
    assert job.output().count("has sent no heartbeat for") == 1


def test_a_job_whose_ranks_were_all_suspended_resumes(jobs):
    job = jobs[all_frozen]
    wait_for(job.folder / "fault")
    while time.time() < (job.folder / "fault").stat().st_mtime + 1.5 * TIMEOUT:
        time.sleep(0.1)
    for process in job.ranks:
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.5)  # hosts resume one after the other
    assert job.codes() == [EXIT_DONE] * RANKS, job.output()


@pytest.mark.parametrize("fault", [killed, killed_unnoticed])
def test_a_killed_rank_is_reported_before_the_timeout(jobs, fault):
    job = jobs[fault]
    assert job.codes() == [EXIT_RANK_LOST, EXIT_RANK_LOST, -signal.SIGKILL]
    assert job.seconds() < TIMEOUT
    output = job.output()
    assert output.count("Rank 2 (") == output.count("titanlite:") == 1, output
    assert "has died. Last heartbeat of rank 2: step 3, backward" in output
    assert "in take_steps" in job.stacks(0) and "in take_steps" in job.stacks(1)


def test_a_straggler_that_still_sends_heartbeats_is_reported(jobs):
    job = jobs[endless_data]
    assert job.codes() == [EXIT_RANK_LOST] * RANKS
    assert job.seconds() < MAX_SECONDS
    output = job.output()
    assert output.count("Rank 2 (") == output.count("has been in step 3, data for") == 1, output
    assert "Waiting for it: 2 ranks in step 3, forward" in output
    assert "in read_forever" in job.stacks(2)


def test_a_rank_that_hangs_while_it_holds_the_gil_prints_its_stack(jobs):
    job = jobs[hung_disk]
    assert job.codes(0, 1) == [EXIT_RANK_LOST, EXIT_RANK_LOST, None]
    assert job.seconds(0, 1) < MAX_SECONDS
    assert "Last heartbeat of rank 2: step 3, data" in job.output()
    assert "in hung_disk" in job.output()


def test_a_deadlock_of_all_ranks_is_reported_as_one(jobs):
    job = jobs[deadlock]
    assert job.codes() == [EXIT_RANK_LOST] * RANKS
    assert job.seconds() < MAX_SECONDS
    output = job.output()
    assert output.count("All 3 ranks have been in step 3, forward for") == 1, output
    assert "or are only slow. If they are slow, raise comm.init_timeout_seconds" in output
    assert "in deadlock" in job.stacks(1)


def test_a_rank_that_exits_with_an_error_is_reported_with_it_and_not_as_dead(jobs):
    job = jobs[user_error]
    assert job.codes() == [EXIT_RANK_LOST, EXIT_RANK_LOST, EXIT_USER_ERROR]
    output = job.output()
    assert output.count("has left at step 3, data (ConfigError: an invalid setting)") == 1, output
    assert "died" not in output


def test_an_error_of_this_rank_is_not_blamed_on_another(jobs):
    job = jobs[own_error]
    assert EXIT_OWN_ERROR in job.codes()  # the others may see that the first one left with it
    assert "died" not in job.output()


def test_a_save_may_take_longer_than_the_timeout(jobs):
    job = jobs[slow_save]
    assert job.codes() == [EXIT_DONE] * RANKS, job.output()
    assert job.seconds() > 1.3 * TIMEOUT


def test_a_restarted_job_ignores_the_heartbeats_and_verdict_of_the_start_before(tmp_path):
    """torchrun keeps its store when it restarts the ranks."""
    store = open_store()
    before = Job(tmp_path / "before", killed, store.port)
    assert EXIT_RANK_LOST in before.codes()
    restarted = Job(tmp_path / "again", no_fault, store.port, restart=1)
    assert restarted.codes() == [EXIT_DONE] * RANKS, restarted.output()
    assert restarted.output() == ""


def test_ranks_end_when_the_store_does_not_answer(tmp_path):
    here, there = multiprocessing.Pipe()
    store = forkserver().Process(target=serve_in_process, args=(there,), daemon=True)
    store.start()
    job = Job(tmp_path / "job", frozen_store, here.recv())
    try:
        wait_for(job.folder / "fault")
        os.kill(store.pid, signal.SIGSTOP)
        assert job.codes() == [EXIT_RANK_LOST] * RANKS
        assert job.seconds() < MAX_SECONDS
        assert "does not answer: the launcher, or rank 0, is gone" in job.output()
        assert "in frozen_store" in job.stacks(1)
    finally:
        store.kill()
        job.kill()


def train_on_one_rank(folder: Path) -> None:
    os.dup2(os.open(folder / "output", os.O_CREAT | os.O_WRONLY), 2)
    with HeartbeatWatchdog(0, 1, 0.2, folder) as watchdog:
        for step in (1, 2):
            watchdog.set_phase(step, "data")
            time.sleep(0.4)  # longer than the timeout, which is for waiting ranks
        read_forever()


def test_a_single_rank_that_hangs_is_reported_and_ends(tmp_path):
    process = forkserver().Process(target=train_on_one_rank, args=(tmp_path,), daemon=True)
    process.start()
    process.join(4 * TIMEOUT)
    output = (tmp_path / "output").read_text()
    assert process.exitcode == EXIT_RANK_LOST, output
    hangs = "Rank 0: data of step 2 has taken 2 s, and is in read_forever"
    assert f"titanlite: {hangs}" in output
    assert "The limit is 10 * comm.init_timeout_seconds = 2." in output
    assert "in read_forever" in (tmp_path / "stacks" / "rank_0.txt").read_text()


WORKER = """
import os, sys, time, torch
from pathlib import Path
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.runtime.watchdog import HeartbeatWatchdog, exit_when_launcher_dies
exit_when_launcher_dies()
folder = Path(sys.argv[1])
cpu, report = torch.device("cpu"), ErrorReport()
with join_process_group(cpu, CommConfig(), DebugConfig(), folder, report) as session:
    with HeartbeatWatchdog(session.rank, session.world_size, 60, folder, session.start_id):
        (folder / f"pid_{session.rank}").write_text(str(os.getpid()))
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals that a parent ended")
def test_a_launched_job_listens_on_loopback_only_and_ends_with_its_launcher(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    command = ["bash", str(ROOT / "scripts/launch.sh"), "2", str(script), str(tmp_path)]
    torchrun = subprocess.Popen(command, env=environment)
    pids = [int(wait_for(tmp_path / f"pid_{rank}")) for rank in range(2)]
    time.sleep(0.5)  # ranks must not end before the launcher either
    assert all(map(is_running, pids))
    listening = listening_addresses([torchrun.pid, *pids])
    assert len(listening) >= 3  # the store, and gloo in both ranks
    assert all(address.is_loopback for address in listening), listening
    torchrun.kill()
    torchrun.wait()
    deadline = time.monotonic() + HANG_SECONDS
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def listening_addresses(pids: list[int]) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses that these processes listen on, from /proc."""
    sockets = {
        os.readlink(entry)
        for pid in pids
        for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink()
    }
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:  # LISTEN
                words = bytes.fromhex(local.partition(":")[0])  # of 32 bits, little-endian
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.append(ipaddress.ip_address(raw))
    return addresses


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(path: Path) -> str:
    """The text of a file, once it exists."""
    deadline = time.monotonic() + HANG_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)  # it may exist before its content
    return path.read_text()
