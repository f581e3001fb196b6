"""Rewards of the user that go wrong: a reason each, and no process stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import HANG_SECONDS
from titanlite_post.rewards import REWARDS, RewardProcesses, RewardTask

MODULE = """
import os, sys, time
from titanlite_post.rewards import REWARDS

def odd(completion, record):
    print("a line that is no reward", flush=True)
    if completion == "raise":
        return 1 / 0
    if completion == "exit":
        sys.exit(0)
    if completion == "memory":
        return len(bytearray(5 << 30))
    if completion in ("hang", "fork"):
        child = os.fork()
        if child == 0:
            time.sleep(1e6)
        with open(record["pids"], "a") as file:
            file.write(f"{os.getpid()} {child} end\\n")
    if completion == "hang":
        time.sleep(1e6)
    return {"nan": float("nan"), "text": "x"}.get(completion, 0.5)

REWARDS["odd"] = odd
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.modules", {**sys.modules})
    monkeypatch.setitem(REWARDS, "odd", None)
    __import__("odd_rewards")
    return tmp_path


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} still run"
        time.sleep(0.01)


def test_a_reward_that_goes_wrong_is_a_reason_and_the_others_are_computed(folder):
    kinds = ["good", "raise", "fine", "nan", "exit", "memory", "text", "fork", "after"]
    tasks = [RewardTask(kind, {"pids": str(folder / "pids")}) for kind in kinds]
    results = RewardProcesses("odd", 2, HANG_SECONDS).compute(tasks)
    expected = {
        "raise": "raised ZeroDivisionError: division by zero",
        "nan": "returned nan",
        "exit": "ended its process; it may have used too much memory",
        "memory": "raised MemoryError: ",
        "text": "raised ValueError: could not convert string to float: 'x'",
    }
    assert results == [expected.get(kind, 0.5) for kind in kinds]


def test_a_reward_that_hangs_ends_with_all_that_it_has_started(folder):
    pids = folder / "pids"
    tasks = [RewardTask("hang", {"pids": str(pids)}), RewardTask("good", {})]
    processes = RewardProcesses("odd", 1, HANG_SECONDS)
    assert processes.compute(tasks[1:]) == [0.5]  # its process has started
    processes._timeout = 2
    (reason,) = processes.compute(tasks[:1])
    assert reason == "took more than 2 s (grpo.reward_timeout_seconds)"
    wait_until_ended([int(word) for word in pids.read_text().split() if word.isdigit()])
    processes._timeout = HANG_SECONDS
    assert processes.compute(tasks[1:]) == [0.5]


def test_a_killed_trainer_leaves_no_process_of_a_reward_behind(folder):
    pids = folder / "pids"
    program = f"""
import odd_rewards
from titanlite_post.rewards import RewardProcesses, RewardTask
RewardProcesses("odd", 1, 1e6).compute([RewardTask("hang", {{"pids": {str(pids)!r}}})])
"""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as trainer:
        deadline = time.monotonic() + HANG_SECONDS
        while not pids.exists() or "end" not in pids.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        trainer.send_signal(signal.SIGKILL)
    wait_until_ended([int(word) for word in pids.read_text().split() if word.isdigit()])
