"""Two jobs never write to one folder, and a dead one does not keep it."""

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
from contextlib import contextmanager
from pathlib import Path

import pytest

from titanlite.errors import CheckpointError, ConfigError
from titanlite.runtime.lease import COUNT_FILE, LEASE_FILE, _look, _rename_away, acquire_lease

ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_seconds": 0.05, "stale_seconds": 0.5}
STILL = 0.2  # what to wait for a heartbeat that nobody makes

# One process of a job, told what to do line by line. The lease is loaded as a file of its own, or
# titanlite.checkpoint would load torch for seconds.
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
    elif verb == "take":
        at, folder = rest.split(" ", 1)
        while time.monotonic() < float(at):
            pass
        try:
            lease = acquire_lease(
                pathlib.Path(folder), heartbeat_seconds={heartbeat}, stale_seconds={stale}
            )
            print("taken", flush=True)
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
    """A job in a process of its own."""

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

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def take(self, folder: Path) -> str:
        return self.ask(f"take 0 {folder}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_job():
    started = []

    def start(*before: str) -> Job:
        started.append(Job(*before))
        assert started[-1].hear() == "ready"
        return started[-1]

    yield start
    for job in started:
        job.kill()


@contextmanager
def taken(folder: Path, **other):
    with acquire_lease(folder, **{**QUICK, **other}) as lease:
        yield lease


def rewrite(folder: Path, **changes) -> None:
    """Change what a lease says of its holder, as if another had written it."""
    path = folder / LEASE_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def is_held(folder: Path) -> bool:
    return names_in(folder) == {LEASE_FILE, COUNT_FILE}


def is_given_back(folder: Path) -> bool:
    return names_in(folder) == {COUNT_FILE}


def eventually(condition, seconds: float = 5) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return bool(met)


@contextmanager
def heart(path: Path):
    """Somebody elsewhere who keeps a lease fresh."""
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
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")
    return lambda: caplog.text


def test_the_second_job_on_a_folder_is_refused_and_told_by_whom(tmp_path, start_job):
    first = start_job()
    assert first.take(tmp_path / "out") == "taken"
    with pytest.raises(ConfigError) as refused, taken(tmp_path / "out"):
        pass
    holder = json.loads((tmp_path / "out" / LEASE_FILE).read_text())
    text = str(refused.value)
    assert f"job.dump_folder = {tmp_path}/out: another job is writing there" in text
    assert f"process {first.process.pid} on {holder['host']}" in text
    assert f"since {time.strftime('%Y-%m-%d %H:')}" in text and "heartbeat was 0 s ago" in text
    assert "Use another job.dump_folder, or end that process" in text
    assert first.ask("lost") == ""
    assert is_held(tmp_path / "out")


def test_the_refusal_says_how_old_the_heartbeat_is(tmp_path):
    with acquire_lease(tmp_path):
        os.utime(tmp_path / LEASE_FILE, (0, time.time() - 100))
        with pytest.raises(ConfigError, match="heartbeat was 100 s ago"):
            acquire_lease(tmp_path)


def test_a_lease_is_given_back(tmp_path, start_job):
    with taken(tmp_path):
        assert (tmp_path / LEASE_FILE).exists()
    assert is_given_back(tmp_path)
    assert start_job().take(tmp_path) == "taken"


def test_an_error_gives_the_lease_back_too(tmp_path):
    with pytest.raises(ZeroDivisionError), taken(tmp_path):
        raise ZeroDivisionError
    assert is_given_back(tmp_path)


def test_a_job_killed_on_this_host_is_not_waited_for(tmp_path, start_job, said):
    first = start_job()
    assert first.take(tmp_path) == "taken"
    first.kill()
    assert (tmp_path / LEASE_FILE).exists()
    began = time.monotonic()
    with acquire_lease(tmp_path):  # with the true 30 s
        assert time.monotonic() - began < 2
        assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == os.getpid()
    assert f"taken over from process {first.process.pid} on" in said()
    assert "that process is gone" in said()


def test_a_killed_job_that_nobody_reaps_is_dead(tmp_path, start_job):
    first = start_job()
    assert first.take(tmp_path) == "taken"
    first.process.send_signal(signal.SIGKILL)
    stat = Path(f"/proc/{first.process.pid}/stat")
    assert eventually(lambda: ") Z " in stat.read_text())
    with taken(tmp_path) as lease:
        assert not lease.lost


def test_a_stopped_job_still_holds_its_folder(tmp_path, start_job):
    first = start_job()
    assert first.take(tmp_path) == "taken"
    first.process.send_signal(signal.SIGSTOP)
    time.sleep(QUICK["stale_seconds"])
    with pytest.raises(ConfigError, match=f"process {first.process.pid} "), taken(tmp_path):
        pass


def test_a_reused_process_number_is_not_believed(tmp_path):
    with taken(tmp_path):
        rewrite(tmp_path, process_started=1)  # so our pid is some earlier process's
        with acquire_lease(tmp_path) as lease:
            assert not lease.lost


NOT_THERE = 2**22 - 1  # no process has this number


@pytest.mark.parametrize(
    "change",
    [
        {"host": "elsewhere"},
        {"boot": "another"},
        {"processes": 7, "process_started": 1},
        {"host": "elsewhere", "pid": NOT_THERE},
        {"processes": 7, "pid": NOT_THERE},
    ],
    ids=str,
)
def test_a_process_number_from_elsewhere_means_nothing_here(tmp_path, said, change):
    with taken(tmp_path):
        rewrite(tmp_path, **change)
        began = time.monotonic()
        with taken(tmp_path, stale_seconds=STILL):
            assert time.monotonic() - began >= STILL
    assert "watching its heartbeat for up to 0.2 s" in said()
    assert "its heartbeat stood still for 0.2 s" in said()


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """The lease of a job on another host."""
    with taken(tmp_path) as lease:
        rewrite(tmp_path, host="elsewhere")
    return lease.path


def test_a_job_elsewhere_that_beats_is_not_robbed(elsewhere):
    with heart(elsewhere), pytest.raises(ConfigError, match="on elsewhere"):
        acquire_lease(elsewhere.parent)  # with the true 30 s
    assert json.loads(elsewhere.read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("skew", [-1e6, 1e6])
def test_a_clock_that_is_wrong_makes_no_job_dead_or_alive(elsewhere, skew):
    os.utime(elsewhere, (0, time.time() + skew))
    began = time.monotonic()
    with taken(elsewhere.parent, stale_seconds=STILL):
        assert time.monotonic() - began >= STILL


def test_containers_with_one_host_name_do_not_rob_each_other(tmp_path, start_job):
    box = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    box += ["--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*box, "true"], check=False).returncode:
        pytest.skip("this host lets nobody make containers")
    first, second = start_job(*box), start_job(*box)
    assert first.take(tmp_path) == "taken"
    assert json.loads((tmp_path / LEASE_FILE).read_text())["pid"] == 1
    assert second.take(tmp_path).startswith("refused")  # it is process 1, too
    with pytest.raises(ConfigError), taken(tmp_path):
        pass
    assert first.ask("lost") == ""
    first.kill()
    assert second.take(tmp_path) == "taken"


@pytest.mark.parametrize("torn", [b"", b'{"host": "n', b"\0\0\0", b"[]", b'{"pid": 1}'], ids=repr)
def test_a_lease_torn_by_a_crash_is_waited_for_and_taken(tmp_path, torn):
    (tmp_path / LEASE_FILE).write_bytes(torn)
    began = time.monotonic()
    with taken(tmp_path, stale_seconds=STILL) as lease:
        assert time.monotonic() - began >= STILL
        assert not lease.lost
    assert is_given_back(tmp_path)


def test_a_lease_that_is_still_being_written_is_not_taken(tmp_path, start_job):
    first = start_job()
    assert first.take(tmp_path / "true") == "taken"
    content = (tmp_path / "true" / LEASE_FILE).read_bytes()
    with (tmp_path / LEASE_FILE).open("xb", buffering=0) as file:
        threading.Timer(0.1, lambda: file.write(content)).start()
        with pytest.raises(ConfigError, match=f"process {first.process.pid} "), taken(tmp_path):
            pass


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no-locks"])
def test_of_jobs_that_race_for_a_dead_ones_folder_exactly_one_wins(tmp_path, start_job, locks):
    dead = start_job()
    assert dead.take(tmp_path) == "taken"
    dead.kill()
    content = (tmp_path / LEASE_FILE).read_bytes()
    jobs = [start_job() for _ in range(3 if locks else 2)]  # cores are few; two race harder
    assert locks or all(job.ask("nolocks") == "ok" for job in jobs)
    winners = set()
    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / LEASE_FILE).write_bytes(content)
        (folder / COUNT_FILE).write_bytes(b".")
        together = time.monotonic() + 0.003
        for place, job in enumerate(jobs):
            apart = place * (number % 5) * 5e-5  # so that they meet at every stage
            job.tell(f"take {together + apart} {folder}")
        answers = [job.hear().partition(" ")[0] for job in jobs]
        assert sorted(answers) == ["refused"] * (len(jobs) - 1) + ["taken"], f"round {number}"
        winner = jobs[answers.index("taken")]
        winners.add(winner.process.pid)
        assert is_held(folder)
        holder = json.loads((folder / LEASE_FILE).read_text())
        assert holder["pid"] == winner.process.pid and winner.ask("lost") == ""
        assert holder["number"] == 2, "the dead job's was 1"
        assert all(job.ask("close") == "closed" for job in jobs)
        assert is_given_back(folder)
    assert len(winners) > 1, "it was no race"


def test_a_lease_taken_by_another_is_noticed_and_left_to_it(tmp_path, start_job):
    with taken(tmp_path) as lease:
        other = start_job()
        assert other.take(tmp_path / "other") == "taken"
        os.replace(tmp_path / "other" / LEASE_FILE, tmp_path / LEASE_FILE)
        assert eventually(lambda: lease.lost)
        assert f"process {other.process.pid} on" in lease.lost
        before = os.stat(tmp_path / LEASE_FILE)
    time.sleep(3 * QUICK["heartbeat_seconds"])
    assert os.stat(tmp_path / LEASE_FILE).st_mtime_ns == before.st_mtime_ns


def test_a_lease_that_was_removed_is_noticed(tmp_path):
    with taken(tmp_path) as lease:
        (tmp_path / LEASE_FILE).unlink()
        assert eventually(lambda: lease.lost)
        assert "was removed" in lease.lost


def test_a_lease_that_is_away_for_a_moment_is_not_lost(tmp_path):
    """While another job puts it back that had taken it for an older one."""
    with acquire_lease(tmp_path, heartbeat_seconds=0.3) as lease:
        for _ in range(2):
            before = lease.path.stat().st_mtime_ns
            assert eventually(lambda before=before: lease.path.stat().st_mtime_ns > before)
            time.sleep(0.15)
            lease.path.rename(tmp_path / "aside")
            time.sleep(0.3)  # one look at it, not two
            (tmp_path / "aside").rename(lease.path)
        assert not lease.lost


def test_a_lease_that_changed_hands_while_it_was_judged_is_put_back(tmp_path):
    (tmp_path / LEASE_FILE).write_bytes(b"of a dead job")
    judged = _look(tmp_path / LEASE_FILE)
    (tmp_path / LEASE_FILE).unlink()
    with taken(tmp_path) as lease:
        content = lease.path.read_bytes()
        assert not _rename_away(lease.path, judged)
        assert lease.path.read_bytes() == content
        assert is_held(tmp_path)
        time.sleep(4 * QUICK["heartbeat_seconds"])
        assert not lease.lost
        before = lease.path.stat().st_mtime_ns
        assert eventually(lambda: lease.path.stat().st_mtime_ns > before), "its heart stopped"


def test_every_taking_of_a_lease_gets_a_larger_number(tmp_path, start_job):
    numbers = []
    for _ in range(2):
        with taken(tmp_path) as lease:
            numbers.append(lease.number)
    dead = start_job()
    assert dead.take(tmp_path) == "taken"
    numbers.append(json.loads((tmp_path / LEASE_FILE).read_text())["number"])
    dead.kill()
    with taken(tmp_path) as lease:
        numbers.append(lease.number)
        assert json.loads(lease.path.read_text())["number"] == lease.number
    assert numbers == [1, 2, 3, 4]


def test_a_check_reads_the_lease_itself_and_does_not_wait_for_a_heartbeat(tmp_path):
    with acquire_lease(tmp_path, heartbeat_seconds=1000) as lease:
        lease.check()
        rewrite(tmp_path, host="elsewhere")
        with pytest.raises(CheckpointError, match="on elsewhere .* has taken it from this job"):
            lease.check()
    with acquire_lease(tmp_path / "2", heartbeat_seconds=1000) as lease:
        lease.path.unlink()
        with pytest.raises(CheckpointError, match="was removed"):
            lease.check()


def test_a_folder_that_cannot_be_written_to_is_the_users_to_mend(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*file/out: .*Not a directory"):
        acquire_lease(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    "make",
    (lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.mkdir),
    ids=("link", "fifo", "folder"),
)
def test_a_lease_that_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / LEASE_FILE)
    with pytest.raises(ConfigError, match=r"lease.json: is not a regular file"):
        acquire_lease(tmp_path)
