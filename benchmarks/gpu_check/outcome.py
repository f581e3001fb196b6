"""The result of one check, and what all checks share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Literal

from benchmarks.processes import ROOT, failure_reason, python_path

Status = Literal["passed", "failed", "skipped"]
# Environment variables that torchrun sets for each rank
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "ROLE_", "MASTER_")
LOG_LINES = 60  # of a failed command, in the report


@dataclass(frozen=True)
class Outcome:
    """The result of one check."""

    name: str
    status: Status
    result: str = ""  # figures, or why it failed or was skipped
    seconds: float = 0.0
    log: str = ""  # the end of the output of what failed


@dataclass(frozen=True)
class Machine:
    """What the checks run on, and until when they may start."""

    devices: int  # GPUs; without a GPU, processes on the CPU
    cuda: bool
    folder: Path  # for corpora and runs
    end: float = field(default=float("inf"))  # time.monotonic() at which no check starts any more
    locks: dict[str, Lock] = field(default_factory=dict, compare=False)

    def lock(self, name: str) -> Lock:
        """The lock of a file or run in `folder` that several checks share."""
        return self.locks.setdefault(name, Lock())

    @property
    def runs_at_once(self) -> int:
        """Runs that the CPU cores can start and compare at the same time."""
        return max(1, min(4, (os.cpu_count() or 1) // 4))

    @property
    def device_type(self) -> str:
        return "cuda" if self.cuda else "cpu"


@dataclass(frozen=True)
class Check:
    """A named check; `run` yields its outcomes, or raises CheckFailed or CheckSkipped."""

    name: str
    run: Callable[[Machine], Iterable[Outcome]]
    needs_cuda: bool = False
    min_devices: int = 1
    beside_others: bool = False  # measures no speed, so that it may run at the same time as others

    def outcomes(self, machine: Machine) -> Iterable[Outcome]:
        """Run the check if the machine can; an error of any kind is an outcome, too."""
        if self.needs_cuda and not machine.cuda:
            yield Outcome(self.name, "skipped", "needs CUDA")
        elif self.min_devices > machine.devices:
            yield Outcome(self.name, "skipped", f"needs {self.min_devices} devices")
        elif time.monotonic() > machine.end:
            yield Outcome(self.name, "skipped", "the time limit has passed: see --minutes")
        else:
            yield from self._run_and_time(machine)

    def _run_and_time(self, machine: Machine) -> Iterable[Outcome]:
        started = time.monotonic()
        try:
            for outcome in self.run(machine):
                yield replace(outcome, seconds=time.monotonic() - started)
                started = time.monotonic()
        except CheckSkipped as reason:
            yield Outcome(self.name, "skipped", str(reason))
        except CheckFailed as error:
            seconds = time.monotonic() - started
            yield Outcome(self.name, "failed", str(error), seconds, error.log)
        except Exception as error:  # the other checks still run
            reason = f"{type(error).__name__}: {error}"
            yield Outcome(self.name, "failed", reason, time.monotonic() - started)


class CheckSkipped(Exception):
    """A check cannot run on this machine; the message is the reason."""


class CheckFailed(Exception):
    """A check failed; `log` is the end of the output of the command that shows why."""

    def __init__(self, reason: str, log: str = ""):
        super().__init__(reason)
        self.log = "\n".join(log.splitlines()[-LOG_LINES:])


def run_command(
    command: Sequence[str], *, timeout: float, variables: Mapping[str, str] | None = None
) -> str:
    """The output of a command in the repository's root; raises CheckFailed with its end.

    The command gets a session of its own, so that a timeout ends all of its processes.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=command_environment() | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise CheckFailed(f"not finished after {timeout:.0f} s", output) from None
    if process.returncode:
        reason = failure_reason(output) or "no output"
        raise CheckFailed(f"exit code {process.returncode}: {reason}", output)
    return output


def command_environment() -> dict[str, str]:
    """The environment of a command, whose ranks are not those of a torchrun around this process."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    programs = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", os.defpath)))
    # PATH: torchrun of this environment
    return kept | {"PYTHONPATH": python_path(), "PATH": programs}
