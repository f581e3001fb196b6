"""Run each measurement in its own process, and alternate between compared programs."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from benchmarks.table_rows import NotMeasured
from titanlite_lab.run_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Result = TypeVar("Result")


@dataclass(frozen=True)
class Task:
    """The work that all compared programs do."""

    flavor: str = "quickstart"
    seq_len: int = 256
    batch: int = 16
    dtype: str = "bfloat16"  # compute dtype; parameters and optimizer state are fp32
    device: str = "cpu"
    steps: int = 14
    skipped: int = 4  # first steps, which warm up caches and are not counted

    def speed(self, end_times: Sequence[float]) -> float:
        """Tokens/s of the median step, from the end times of the steps in seconds.

        The time between two step ends includes waiting for data, logging and garbage collection.
        The median ignores a short burst of other load on the machine.
        """
        counted = end_times[self.skipped - 1 :]
        durations = [after - before for before, after in pairwise(counted)]
        return self.batch * self.seq_len / statistics.median(durations)


def alternate(rounds: int, **contenders: Callable[[], Result]) -> dict[str, list[Result]]:
    """Results per contender and round; every second round in reverse order, against drift."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            results[name].append(contenders[name]())
    return results


def run(command: Sequence[str], *, threads: int = CORES, **variables: str) -> str:
    """The stdout of a Python command; raises NotMeasured with the reason if it fails."""
    process = _run_python(command, threads, variables)
    if process.returncode:
        raise NotMeasured(failure_reason(process.stderr) or f"exit code {process.returncode}")
    return process.stdout


def failure_reason(stderr: str) -> str:
    """The reason of a failure in one line: titanlite's errors, or the last line of a traceback."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("titanlite: ") for line in lines if line.startswith("titanlite: ")]
    errors += [line for line in lines if re.match(r"\d+\. ", line)] if errors else []
    return " ".join(errors or lines[-1:]).replace("|", "/")[:200]


def python_path() -> str:
    """PYTHONPATH of a process that imports this repository."""
    return os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "extras"), os.environ.get("PYTHONPATH")))
    )


def _run_python(command, threads: int, variables: Mapping[str, str]) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "OMP_NUM_THREADS": str(max(1, threads)),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment | variables, capture_output=True, text=True
    )


# --- train.py itself -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainResult:
    """The metrics of one run of train.py."""

    task: Task
    launched: float  # seconds since 1970
    steps: list[dict]  # its step lines in metrics.jsonl
    recompilations: int

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return self.task.speed([step["time"] for step in self.steps])

    @property
    def mean_speed(self) -> float:
        """Tokens/s of all counted steps together, with what happens between them."""
        counted = self.steps[self.task.skipped - 1 :]
        seconds = counted[-1]["time"] - counted[0]["time"]
        return self.task.batch * self.task.seq_len * (len(counted) - 1) / seconds

    @property
    def first_step_seconds(self) -> float:
        return self.steps[0]["time"] - self.launched

    @property
    def data_share(self) -> float:
        """Share of the step time spent waiting for data."""
        counted = self.steps[self.task.skipped :]
        waited = sum(step["data_seconds"] for step in counted)
        return waited / (waited + sum(step["step_seconds"] for step in counted))

    @property
    def peak_flops(self) -> float:
        """Published or measured peak FLOP/s of the device; raises NotMeasured."""
        step = self.steps[-1]
        if not step["mfu"]:
            raise NotMeasured("the peak of this GPU is unknown")
        return step["tflops_per_device"] * 1e12 / step["mfu"]

    @property
    def peak_memory_gib(self) -> float:
        return self.steps[-1]["peak_memory_gib"]


def settings_of(task: Task, corpus: Path, folder: str) -> dict[str, object]:
    """The settings of train.py for a task."""
    return {
        "job.dump_folder": folder,
        "job.device": task.device,
        "model.flavor": task.flavor,
        "data.sources": f'[{{ name = "text", path = "{corpus}/train" }}]',
        "training.seq_len": task.seq_len,
        "training.local_batch_size": task.batch,
        "training.steps": task.steps,
        "training.mixed_precision_param": task.dtype,
        "activation_checkpoint.mode": "none",
        "metrics.log_freq": 1,
    }


def as_arguments(settings: Mapping[str, object]) -> list[str]:
    """Settings as command-line arguments of train.py."""
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]


def step_lines(folder: str | Path) -> list[dict]:
    """The step lines of a run's metrics.jsonl."""
    return read_metrics(Path(folder) / "metrics.jsonl")[0]


def train(
    task: Task, corpus: Path, *, processes: int = 1, cache: str = "", **settings: object
) -> TrainResult:
    """Run train.py as a user does.

    `cache` is the folder of Inductor's cache; in the names of `settings`, `__` stands for a dot.
    """
    with tempfile.TemporaryDirectory() as folder:
        keys = settings_of(task, corpus, folder)
        keys |= {
            "training.local_batch_size": task.batch // processes,
            "training.global_batch_size": task.batch,
        }
        keys |= {key.replace("__", "."): value for key, value in settings.items()}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*(launch if processes > 1 else []), str(ROOT / "train.py"), *as_arguments(keys)]
        variables = {"TORCH_LOGS": "recompiles"} | (
            {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {}
        )
        launched = time.time()
        process = _run_python(command, CORES // processes, variables)
        if process.returncode:
            reason = failure_reason(process.stderr)
            raise NotMeasured(reason or f"train.py: exit code {process.returncode}")
        recompilations = process.stderr.count("Recompiling function")
        return TrainResult(task, launched, step_lines(folder), recompilations)
