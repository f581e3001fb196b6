"""A run that loses hosts continues from the memory of those that are left, or from the disk."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.launch import LaunchedRun, events_of, lines_of
from tests.faults.test_kill import final_state
from titanlite.checkpoint import memory_save
from titanlite.checkpoint.memory_sets import FOLDER_VARIABLE

STEPS = 24  # of test_kill.final_state
SETTINGS = {
    "training.steps": STEPS,
    "validation.enable": "false",
    "checkpoint.interval": 100,
    "checkpoint.memory_interval": 3,
    "comm.train_timeout_seconds": 10,
}


def prepare(memory: Path, hosts: str, slow: int | None) -> None:
    """Give each host a memory folder; let rank `slow` write slowly."""
    rank = int(os.environ["RANK"])
    host = memory / hosts[rank].replace("-", "missing")
    if hosts[rank] != "-":
        host.mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER_VARIABLE] = str(host)
    if rank == slow:
        write = memory_save.write_file
        memory_save.write_file = lambda *args: (time.sleep(1.5), write(*args))


def start(run_toml, out: Path, hosts: str, *argv, slow: int | None = None) -> LaunchedRun:
    """Start a run whose rank i is on host hosts[i]; "-" has no memory folder."""
    options = [text for key, value in SETTINGS.items() for text in (f"--{key}", str(value))]
    argv = ("--job.config_file", str(run_toml), "--job.dump_folder", str(out), *options, *argv)
    memory = out.with_name("memory")
    return LaunchedRun(len(hosts), out, *argv, prepare=partial(prepare, memory, hosts, slow))


def kill_after_step(run: LaunchedRun, out: Path, step: int) -> int:
    """Kill all ranks once a memory checkpoint of `step` or later is complete; returns its step."""

    def saved() -> list[int]:
        return [event["step"] for event in events_of(out, "memory_checkpoint_saved")]

    run.wait_for(lambda: max(saved(), default=0) >= step)
    for rank in range(len(run.processes)):
        run.signal(rank, signal.SIGKILL)
    run.wait()
    return max(saved())


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(out) if "event" not in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def whole(folder, run_toml) -> Path:
    """The output of a run that loses nothing; the first test trains it."""
    out = folder / "out"
    if not out.exists():
        with start(run_toml, out, "aa", slow=1) as run:  # slow writes delay no step
            assert run.wait() == [0, 0], run.output
        assert "survive killed processes, not the loss of the machine" in run.output
        assert "still being written" in events_of(out, "memory_checkpoint_failed")[0]["reason"]
    return out


def test_a_run_that_loses_hosts_has_the_losses_of_an_undisturbed_run(run_toml, whole, tmp_path):
    out, memory = tmp_path / "out", tmp_path / "memory"
    with start(run_toml, out, "ab") as run:
        saved = kill_after_step(run, out, 3)
    shutil.rmtree(memory / "b")
    tensor = ("--parallelism.tensor_parallel_degree", "2", "--checkpoint.interval", "4")
    with start(run_toml, out, "ca", *tensor) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        run.signal(0, signal.SIGKILL)
        run.wait()
    shutil.rmtree(memory)  # of both hosts
    with start(run_toml, out, "a-") as run:  # one host has no memory folder
        assert run.wait() == [0, 0], run.output
    first, second = events_of(out, "resumed")
    assert (first["source"], second["source"]) == ("memory", "disk")
    assert first["step"] >= saved and second["step"] % 4 == 0
    assert "missing: No such file" in events_of(out, "memory_checkpoint_failed")[0]["reason"]
    assert losses(out) == pytest.approx(losses(whole), rel=1e-5)


def test_a_run_that_loses_a_host_ends_bit_equal_under_the_same_layout(run_toml, whole, tmp_path):
    out = tmp_path / "out"
    with start(run_toml, out, "ab") as run:
        kill_after_step(run, out, 6)
    shutil.rmtree(tmp_path / "memory" / "b")
    with start(run_toml, out, "ac") as run:
        assert run.wait() == [0, 0], run.output
    assert [event["source"] for event in events_of(out, "resumed")] == ["memory"]
    assert final_state(out) == final_state(whole)
    assert not list(tmp_path.glob("memory/*/*/*/*"))  # the run has ended
