"""Rewards: functions of a completion and its prompt's line, in processes with limits.

A reward of yours is a function in a module that `--job.import` names, which adds it:

    from titanlite_post.rewards import REWARDS

    def short(completion, record):
        return float(len(completion) < record["limit"])

    REWARDS["short"] = short

Each process imports that module, and torch is not needed there.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MEMORY_BYTES = 4 << 30  # of a reward process, and of a program that it starts
RewardFunction = Callable[[str, dict[str, Any]], float]


def exact_match(completion: str, record: dict[str, Any]) -> float:
    """1 if the completion is the text `answer` of its line, without white space around both."""
    return float(completion.strip() == str(record["answer"]).strip())


def last_number(completion: str, record: dict[str, Any]) -> float:
    """1 if the last number of the completion equals `answer`, as in arithmetic and GSM8K."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion)
    wanted = float(str(record["answer"]).replace(",", ""))
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == wanted)


def math_answer(completion: str, record: dict[str, Any]) -> float:
    """1 if the completion's formula equals that of `answer`, by the package math-verify."""
    from math_verify import parse, verify

    return float(verify(parse(str(record["answer"])), parse(completion)))


def code_tests(completion: str, record: dict[str, Any]) -> float:
    """1 if the last Python block of the completion, followed by the text `tests`, exits with 0.

    Runs in a process of its own, with limits but as your user: see SECURITY.md.
    """
    blocks = re.findall(r"```(?:python)?\n(.*?)```", completion, re.DOTALL)
    program = f"{blocks[-1] if blocks else completion}\n{record['tests']}\n"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-I", "-c", program],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_limit_program,
            check=False,
        )
    return float(done.returncode == 0)


def _limit_program() -> None:
    _signal_when_parent_ends(signal.SIGKILL)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, 60),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _signal_when_parent_ends(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends (prctl, PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, number)


REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "math_answer": math_answer,
    "code_tests": code_tests,
}


@dataclass(frozen=True)
class RewardTask:
    """A completion to be judged, and the line of its prompt."""

    completion: str
    record: dict[str, Any]


class RewardProcesses:
    """Processes that compute rewards at the same time; one that hangs is replaced."""

    def __init__(self, name: str, processes: int, timeout_seconds: float):
        function = REWARDS[name]
        self._place = f"{function.__module__}:{function.__qualname__}"
        self._timeout = timeout_seconds
        self._processes: list[subprocess.Popen | None] = [None] * processes

    def compute(self, tasks: Sequence[RewardTask]) -> list[float | str]:
        """The reward of each task, or the reason why it has none."""
        results: list[float | str] = [""] * len(tasks)
        for first in range(0, len(tasks), len(self._processes)):
            chunk = tasks[first : first + len(self._processes)]
            for number, task in enumerate(chunk):
                self._send(number, task)
            for number in range(len(chunk)):
                results[first + number] = self._receive(number)
        return results

    def _send(self, number: int, task: RewardTask) -> None:
        if (process := self._processes[number]) is None or process.poll() is not None:
            process = self._processes[number] = subprocess.Popen(
                [sys.executable, "-m", __name__, self._place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # so that `_kill` reaches what it starts
            )
        assert process.stdin is not None
        try:
            line = json.dumps({"completion": task.completion, "record": task.record})
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # `_receive` says that it ended

    def _receive(self, number: int) -> float | str:
        process = self._processes[number]
        assert process is not None and process.stdout is not None
        if not select.select([process.stdout], [], [], self._timeout)[0]:
            self._kill(number)
            return f"took more than {self._timeout:g} s (grpo.reward_timeout_seconds)"
        answer = process.stdout.readline()
        if not answer:
            self._kill(number)
            return "ended its process; it may have used too much memory"
        value = json.loads(answer)
        if isinstance(value, float) and not math.isfinite(value):
            return f"returned {value}"
        return value

    def _kill(self, number: int) -> None:
        process, self._processes[number] = self._processes[number], None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def serve(place: str) -> None:
    """Compute rewards for the lines of stdin; a line of stdout is a number, or a reason as text."""
    if os.getpgrp() != os.getpid():  # a shell or a test, whose group must not be killed
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    _signal_when_parent_ends(signal.SIGTERM)
    if worker := os.fork():  # this process ends with all that a reward function has started
        os.waitpid(worker, 0)
        os.killpg(0, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a reward function prints must not be read as its reward
    module, _, name = place.partition(":")
    function = getattr(import_module(module), name)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer: float | str = float(function(task["completion"], task["record"]))
        except Exception as error:  # whatever a function of the user raises
            answer = f"raised {type(error).__name__}: {error}"
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
