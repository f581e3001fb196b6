"""Two jobs never write to one folder, and a dead job does not block it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from conftest import HANG_SECONDS
from titanlite.errors import CheckpointError, ConfigError
from titanlite.runtime import folder_lock
from titanlite.runtime.lease import (
    COUNT_FILE,
    LEASE_FILE,
    _read_lease_file,
    _rename_away,
    acquire_lease,
)
from titanlite.storage import StorageFolder

ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_seconds": 0.05, "stale_seconds": 0.5}
STALE = 0.2  # seconds without a heartbeat, where there is none

# A process of a job that takes commands by line. It loads lease.py as a single file, because the
# package titanlite.runtime imports torch, which takes seconds.
JOB = """
import fcntl, pathlib, runpy, sys, time

sys.path.insert(0, {root!r})
from titanlite.errors import ConfigError
acquire_lease = runpy.run_path({root!r} + "/titanlite/runtime/lease.py")["acquire_lease"]

def no_locks(*_):
    raise OSError(37, "No locks available")

print("ready", flush=True)
lease = None
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    if verb == "nolocks":  # as NFS without a lock daemon
        fcntl.flock = no_locks
        print("ok", flush=True)
    elif verb == "acquire":
        at, folder = rest.split(" ", 1)
        while time.monotonic() < float(at):
            pass
        try:
            lease = acquire_lease(
                pathlib.Path(folder), heartbeat_seconds={heartbeat}, stale_seconds={stale}
            )
            print("acquired", flush=True)
        except ConfigError as error:
            print("refused", error, flush=True)
    elif verb == "lost":
        print(lease.lost, flush=True)
    elif verb == "close":
        if lease:
            lease.close()
        lease = None
        print("closed", flush=True)
"""


class Job:
    """A job in a separate process."""

    def __init__(self, *before: str):
        script = JOB.format(
            root=str(ROOT), heartbeat=QUICK["heartbeat_seconds"], stale=QUICK["stale_seconds"]
        )
        self.process = subprocess.Popen(
            [*before, sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        return self.process.stdout.readline().strip()

    def request(self, line: str) -> str:
        self.send(line)
        return self.receive()

    def acquire(self, folder: Path) -> str:
        return self.request(f"acquire 0 {folder}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_job():
    started = []

    def start(*before: str) -> Job:
        started.append(Job(*before))
        assert started[-1].receive() == "ready"
        return started[-1]

    yield start
    for job in started:
        job.kill()


@contextmanager
def leased(folder: Path, **options):
    with closing(acquire_lease(folder, **{**QUICK, **options})) as lease:
        yield lease


def rewrite(folder: Path, **changes) -> None:
    """Change fields of a lease, as if another process had written it."""
    path = folder / LEASE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def is_held(folder: Path) -> bool:
    return names_in(folder) == {LEASE_FILE, COUNT_FILE}


def is_released(folder: Path) -> bool:
    return names_in(folder) == {COUNT_FILE}


def eventually(condition, seconds: float = HANG_SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(met)


@contextmanager
def remote_heartbeat(path: Path):
    """A job on another host that keeps its lease fresh."""
    stopped = threading.Event()

    def beat():
        while not stopped.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@pytest.fixture
def log_text(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")
    return lambda: caplog.text


def test_the_second_job_on_a_folder_is_refused_with_the_name_of_the_holder(tmp_path, start_job):
    first = start_job()
    assert first.acquire(tmp_path / "out") == "acquired"
    with pytest.raises(ConfigError) as refused, leased(tmp_path / "out"):
        pass
    holder = json.loads((tmp_path / "out" / LEASE_FILE).read_text())
    text = str(refused.value)
    assert f"job.dump_folder = {tmp_path}/out: another job is writing there" in text
    assert f"process {first.process.pid} on {holder['host']}" in text
    assert f"since {time.strftime('%Y-%m-%d %H:')}" in text
    assert "Use another job.dump_folder, or end that process" in text
    assert first.request("lost") == ""
    assert is_held(tmp_path / "out")


def test_a_lease_is_released(tmp_path, start_job):
    with leased(tmp_path):
        assert (tmp_path / LEASE_FILE).exists()
    assert is_released(tmp_path)
    assert start_job().acquire(tmp_path) == "acquired"


def test_an_error_also_releases_the_lease(tmp_path):
    with pytest.raises(ZeroDivisionError), leased(tmp_path):
        raise ZeroDivisionError
    assert is_released(tmp_path)


def test_a_job_killed_on_this_host_is_replaced_without_waiting(tmp_path, start_job, log_text):
    first = start_job()
    assert first.acquire(tmp_path) == "acquired"
    first.kill()
    assert (tmp_path / LEASE_FILE).exists()
    began = time.monotonic()
    with closing(acquire_lease(tmp_path)):  # with the default of 30 s
        assert time.monotonic() - began < 20  # the stale lease takes 30 s
        assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == os.getpid()
    assert f"taken over from process {first.process.pid} on" in log_text()
    assert "that process has ended" in log_text()


def test_a_zombie_process_counts_as_dead(tmp_path, start_job):
    first = start_job()
    assert first.acquire(tmp_path) == "acquired"
    first.process.send_signal(signal.SIGKILL)
    stat = Path(f"/proc/{first.process.pid}/stat")
    assert eventually(lambda: ") Z " in stat.read_text())
    with leased(tmp_path) as lease:
        assert not lease.lost


def test_a_suspended_job_still_holds_its_folder(tmp_path, start_job):
    first = start_job()
    assert first.acquire(tmp_path) == "acquired"
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(QUICK["stale_seconds"])
    with pytest.raises(ConfigError, match=f"process {first.process.pid} "), leased(tmp_path):
        pass


def test_a_reused_pid_is_not_taken_for_the_holder(tmp_path):
    with leased(tmp_path):
        rewrite(tmp_path, process_started=1)  # so our pid belonged to an earlier process
        with closing(acquire_lease(tmp_path)) as lease:
            assert not lease.lost


UNUSED_PID = 2**22 - 1


@pytest.mark.parametrize(
    "change",
    [
        {"host": "other-host"},
        {"boot": "another"},
        {"processes": 7, "process_started": 1},
        {"host": "other-host", "pid": UNUSED_PID},
        {"processes": 7, "pid": UNUSED_PID},
    ],
    ids=str,
)
def test_a_pid_of_another_host_or_namespace_is_judged_by_its_heartbeat(tmp_path, log_text, change):
    with leased(tmp_path):
        rewrite(tmp_path, **change)
        began = time.monotonic()
        with leased(tmp_path, stale_seconds=STALE):
            assert time.monotonic() - began >= STALE
    assert "watching its heartbeat for up to 0.2 s" in log_text()
    assert "no heartbeat for 0.2 s" in log_text()


@pytest.fixture
def other_host_lease(tmp_path) -> Path:
    """The lease of a job on another host."""
    with leased(tmp_path) as lease:
        rewrite(tmp_path, host="other-host")
    return lease.path


def test_a_job_on_another_host_with_a_heartbeat_keeps_its_folder(other_host_lease):
    with remote_heartbeat(other_host_lease), pytest.raises(ConfigError, match="on other-host"):
        acquire_lease(other_host_lease.parent)  # with the default of 30 s
    assert json.loads(other_host_lease.read_text())["host"] == "other-host"


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_wrong_clocks_do_not_decide_whether_a_job_is_dead(other_host_lease, skew):
    os.utime(other_host_lease, (0, time.time() + skew))
    began = time.monotonic()
    with leased(other_host_lease.parent, stale_seconds=STALE):
        assert time.monotonic() - began >= STALE


def test_a_dead_job_on_another_host_is_waited_for_once_whatever_it_held(tmp_path, log_text):
    for name in ("run", "checkpoint"):
        with leased(tmp_path / name):
            rewrite(tmp_path / name, host="other-host")
    dead = set()
    wait = {"stale_seconds": STALE, "dead": dead}
    with leased(tmp_path / "run", **wait), leased(tmp_path / "checkpoint", **wait):
        assert log_text().count("watching its heartbeat") == 1
    assert "checkpoint/lease.json: taken over" in log_text()


def test_containers_with_one_host_name_do_not_take_each_others_folder(tmp_path, start_job):
    box = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    box += ["--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*box, "complete"], check=False).returncode:
        pytest.skip("this host does not allow containers")
    first, second = start_job(*box), start_job(*box)
    assert first.acquire(tmp_path) == "acquired"
    assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == 1
    assert second.acquire(tmp_path).startswith("refused")  # it is process 1 too
    with pytest.raises(ConfigError), leased(tmp_path):
        pass
    assert first.request("lost") == ""
    first.kill()
    assert second.acquire(tmp_path) == "acquired"


@pytest.mark.parametrize("torn", [b"", b'{"host": "n', b"\0\0\0", b"[]", b'{"pid": 1}'], ids=repr)
def test_a_lease_cut_off_by_a_crash_is_taken_over_after_the_stale_time(tmp_path, torn):
    (tmp_path / LEASE_FILE).write_bytes(torn)
    began = time.monotonic()
    with leased(tmp_path, stale_seconds=STALE) as lease:
        assert time.monotonic() - began >= STALE
        assert not lease.lost
    assert is_released(tmp_path)


def test_a_lease_that_is_still_being_written_is_not_taken_over(tmp_path, start_job):
    first = start_job()
    assert first.acquire(tmp_path / "complete") == "acquired"
    content = (tmp_path / "complete" / LEASE_FILE).read_bytes()
    with (tmp_path / LEASE_FILE).open("xb", buffering=0) as file:
        threading.Timer(0.1, lambda: file.write(content)).start()
        with pytest.raises(ConfigError, match=f"process {first.process.pid} "), leased(tmp_path):
            pass


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_when_jobs_race_for_a_dead_jobs_folder_exactly_one_acquires_it(tmp_path, start_job, locks):
    dead = start_job()
    assert dead.acquire(tmp_path) == "acquired"
    dead.kill()
    content = (tmp_path / LEASE_FILE).read_bytes()
    jobs = [start_job() for _ in range(3 if locks else 2)]  # with few cores, two race harder
    assert locks or all(job.request("nolocks") == "ok" for job in jobs)
    winners = set()
    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / LEASE_FILE).write_bytes(content)
        (folder / COUNT_FILE).write_bytes(b".")
        simultaneously = time.monotonic() + 0.003
        for index, job in enumerate(jobs):
            offset = index * (number % 5) * 5e-5  # so that they meet at every stage
            job.send(f"acquire {simultaneously + offset} {folder}")
        replies = [job.receive().partition(" ")[0] for job in jobs]
        assert sorted(replies) == ["acquired"] + ["refused"] * (len(jobs) - 1), f"round {number}"
        winner = jobs[replies.index("acquired")]
        winners.add(winner.process.pid)
        assert is_held(folder)
        holder = json.loads((folder / LEASE_FILE).read_text())
        assert holder["pid"] == winner.process.pid and winner.request("lost") == ""
        assert holder["number"] == 2, "the dead job's was 1"
        assert all(job.request("close") == "closed" for job in jobs)
        assert is_released(folder)
    assert len(winners) > 1, "it was no race"


def test_two_jobs_that_start_at_once_are_not_both_refused(tmp_path, monkeypatch):
    """The worst order: one job has job.dump_folder when the other one asks for a folder."""
    first_began, second_done = threading.Event(), threading.Event()
    acquire = folder_lock._acquire

    def acquire_in_order(folder, key, dead):
        if key == "second dump":
            assert first_began.wait(HANG_SECONDS)
        if key == "first checkpoint":
            assert second_done.wait(HANG_SECONDS)
        try:
            return acquire(folder, key, dead)
        finally:
            if key == "first dump":
                first_began.set()
            if key == "second checkpoint":
                second_done.set()

    monkeypatch.setattr(folder_lock, "_acquire", acquire_in_order)
    outcomes = {}

    def start(job):
        places = {f"{job} dump": tmp_path / "out", f"{job} checkpoint": tmp_path / "saved"}
        try:
            folders = {key: StorageFolder(path) for key, path in places.items()}
            outcomes[job] = folder_lock._acquire_all(folders)
        except ConfigError as error:
            outcomes[job] = str(error)
        if job == "second":
            second_done.set()

    threads = [threading.Thread(target=start, args=(job,)) for job in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert isinstance(outcomes["first"], list) and "second dump" in outcomes["second"], outcomes
    for lease in outcomes["first"]:
        lease.close()


def test_a_job_whose_lease_was_taken_over_notices_and_leaves_it_alone(tmp_path, start_job):
    with leased(tmp_path) as lease:
        other = start_job()
        assert other.acquire(tmp_path / "other") == "acquired"
        os.replace(tmp_path / "other" / LEASE_FILE, tmp_path / LEASE_FILE)
        assert eventually(lambda: lease.lost)
        assert f"process {other.process.pid} on" in lease.lost
        before = os.stat(tmp_path / LEASE_FILE)
    time.sleep(3 * QUICK["heartbeat_seconds"])
    assert os.stat(tmp_path / LEASE_FILE).st_mtime_ns == before.st_mtime_ns


def test_a_removed_lease_is_noticed(tmp_path):
    with leased(tmp_path) as lease:
        (tmp_path / LEASE_FILE).unlink()
        assert eventually(lambda: lease.lost)
        assert "was removed" in lease.lost


def test_a_lease_that_is_missing_for_a_moment_is_not_lost(tmp_path):
    """Another job may move it, mistaking it for an older one, and put it back."""
    with closing(acquire_lease(tmp_path, heartbeat_seconds=0.3)) as lease:
        for _ in range(2):
            before = lease.path.stat().st_mtime_ns
            assert eventually(lambda before=before: lease.path.stat().st_mtime_ns > before)
            time.sleep(0.15)
            lease.path.rename(tmp_path / "aside")
            time.sleep(0.3)  # missing at one heartbeat, not two
            (tmp_path / "aside").rename(lease.path)
        assert not lease.lost


def test_a_lease_that_is_new_since_it_was_judged_is_put_back(tmp_path):
    (tmp_path / LEASE_FILE).write_bytes(b"of a dead job")
    judged = _read_lease_file(tmp_path / LEASE_FILE)
    (tmp_path / LEASE_FILE).unlink()
    with leased(tmp_path) as lease:
        content = lease.path.read_bytes()
        assert not _rename_away(lease.path, judged)
        assert lease.path.read_bytes() == content
        assert is_held(tmp_path)
        time.sleep(4 * QUICK["heartbeat_seconds"])
        assert not lease.lost
        before = lease.path.stat().st_mtime_ns
        assert eventually(lambda: lease.path.stat().st_mtime_ns > before), "its heartbeat stopped"


def test_every_new_lease_gets_a_larger_number(tmp_path, start_job):
    numbers = []
    for _ in range(2):
        with leased(tmp_path) as lease:
            numbers.append(lease.number)
    dead = start_job()
    assert dead.acquire(tmp_path) == "acquired"
    numbers.append(json.loads((tmp_path / LEASE_FILE).read_text())["number"])
    dead.kill()
    with leased(tmp_path) as lease:
        numbers.append(lease.number)
        assert json.loads(lease.path.read_text())["number"] == lease.number
    assert numbers == [1, 2, 3, 4]


def test_a_check_reads_the_lease_file_without_waiting_for_a_heartbeat(tmp_path):
    with closing(acquire_lease(tmp_path, heartbeat_seconds=1000)) as lease:
        lease.check()
        rewrite(tmp_path, host="other-host")
        with pytest.raises(CheckpointError, match="on other-host .* has taken it from this job"):
            lease.check()
    with closing(acquire_lease(tmp_path / "2", heartbeat_seconds=1000)) as lease:
        lease.path.unlink()
        with pytest.raises(CheckpointError, match="was removed"):
            lease.check()


def test_a_folder_that_cannot_be_written_to_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*file/out: .*Not a directory"):
        acquire_lease(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    "make",
    (lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.mkdir),
    ids=("link", "fifo", "folder"),
)
def test_a_lease_that_is_not_a_regular_file_is_refused_without_waiting(tmp_path, make):
    make(tmp_path / LEASE_FILE)
    with pytest.raises(ConfigError, match=r"lease.json: is not a regular file"):
        acquire_lease(tmp_path)
