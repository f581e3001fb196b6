"""A run that is started repeatedly by the same command, and its processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import CheckpointError

TRAIN = ["-m", "titanlite.train"]
INJECTOR = ["-m", "titanlite_lab.drill.injector"]


@dataclass
class Drill:
    """A run that is started repeatedly by the same command."""

    out: Path
    argv: list[str]
    ranks: int
    layouts: list[list[str]]
    random: random.Random
    max_delay: float  # seconds of training before a fault
    poison: dict[str, Any] | None = None  # a NumericalFault of the data, in every start
    starts: int = 0
    run: subprocess.Popen | None = None  # torchrun of the last start

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoint"

    def start(
        self,
        file_limit: int | None = None,
        environment: Mapping[str, str] | None = None,
        fault: dict[str, Any] | None = None,
    ) -> subprocess.Popen:
        """Start torchrun; writing more than `file_limit` KiB to a file fails in its ranks.

        `environment` is added to that of this process. `fault`: a NumericalFault of this start.
        """
        layout = self.layouts[self.starts % len(self.layouts)]
        self.starts += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        faults = [each for each in (self.poison, fault) if each]
        program = [*INJECTOR, json.dumps(faults)] if faults else TRAIN
        if file_limit is not None:  # neither torchrun nor the log has the limit
            limit = f'exec > >(cat) 2>&1; ulimit -S -f {file_limit} && exec "$@"'
            program = ["--no-python", "bash", "-c", limit, "bash", sys.executable, *program]
        command += [f"--nproc_per_node={self.ranks}", *program, *self.argv]
        command += [f"--job.dump_folder={self.out}", "--job.max_crashes=0", *layout]

        self.log = self.out.with_name(f"{self.out.name}.{self.starts}.log").open("wb")
        # In its own session, as under a scheduler: Ctrl-C here ends the drill, not this run.
        self.run = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        return self.run

    def wait(self, run: subprocess.Popen, seconds: float = 600) -> int:
        """Wait for torchrun and its ranks to end; returns the exit code of torchrun."""
        pids = find_rank_pids(run.pid).values()
        code = run.wait(seconds)
        for _ in range(100):
            running = [pid for pid in pids if is_running(pid)]
            if not running:
                return code
            time.sleep(0.5)
        raise self.failure(f"ranks with pids {running} still run after their launcher ended")

    def kill(self) -> None:
        """Kill the last torchrun and its ranks, if they still run."""
        if self.run is None:
            return
        pids = [self.run.pid, *find_rank_pids(self.run.pid).values()]
        if self.run.poll() is None:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.run.wait()

    def failure(self, problem: str, fix: str = "") -> CheckpointError:
        """An error that names the log of the last start."""
        return CheckpointError(f"{problem}; see {self.log.name}.", fix=fix)

    def ended_early(self) -> CheckpointError:
        return self.failure(
            "the run ended before a fault could be injected",
            fix="If it was complete, use more steps, fewer --faults, or a smaller --longest.",
        )

    def complete_checkpoints(self) -> list[Path]:
        """The checkpoints with a manifest, oldest first."""
        paths = [path for path in self.checkpoints.glob("step-*") if "." not in path.name]
        complete = [path for path in paths if (path / "manifest.json").exists()]
        return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))

    def unfinished(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or whose writer ended: (name, time in ns)."""
        unfinished = set()
        for marker in self.checkpoints.glob("step-*/unfinished"):
            with suppress(OSError):  # finished in the meantime
                unfinished.add((marker.parent.name, marker.stat().st_mtime_ns))
        return unfinished

    def log_text(self) -> str:
        """The output of the last start."""
        return Path(self.log.name).read_text(errors="replace")

    def has_trained(self) -> bool:
        """Whether the last start has logged a step."""
        return "  loss " in self.log_text()


def find_rank_pids(launcher: int) -> dict[int, int]:
    """The pid of each rank that a torchrun has started."""
    pids = {}
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != launcher:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            pids[int(environment[b"RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError, IndexError):
            continue
    return pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
