"""Everything measured runs in a process of its own, and what is compared takes turns."""

from __future__ import annotations

import json
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

from benchmarks.table_rows import Missed

ROOT = Path(__file__).resolve().parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Task:
    """What all that are compared are given to do."""

    flavor: str = "quickstart"
    seq_len: int = 256
    batch: int = 16
    dtype: str = "bfloat16"  # to compute in; weights and moments are fp32
    device: str = "cpu"
    steps: int = 14
    skipped: int = 4  # the first steps, which warm caches and are not counted

    def speed(self, moments: Sequence[float]) -> float:
        """Tokens a second by the median step, from the moments in seconds at which steps ended.

        The time from one end to the next has all in it: waiting for data, logging, collecting
        garbage. The median, because a neighbour's burst of work is no property of ours.
        """
        steps = [after - before for before, after in pairwise(moments[self.skipped - 1 :])]
        return self.batch * self.seq_len / statistics.median(steps)


def take_turns(rounds: int, **contenders: Callable[[], Answer]) -> dict[str, list[Answer]]:
    """What each answers in each round; every other round in reverse, because machines drift."""
    answers: dict[str, list[Answer]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            answers[name].append(contenders[name]())
    return answers


def run(command: Sequence[str], *, threads: int = CORES, **variables: str) -> str:
    """What a command prints; raises Missed with its last words when it fails."""
    done = _start(command, threads, variables)
    if done.returncode:
        raise Missed(last_words(done.stderr) or f"it ended with {done.returncode}")
    return done.stdout


def last_words(stderr: str) -> str:
    """Why it failed, on one line: what a user must change, or else the end of a traceback."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = [line.removeprefix("titanlite: ") for line in lines if line.startswith("titanlite: ")]
    told += [line for line in lines if re.match(r"\d+\. ", line)] if told else []
    return " ".join(told or lines[-1:]).replace("|", "/")[:200]


def _start(command, threads: int, variables: Mapping[str, str]) -> subprocess.CompletedProcess:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(max(1, threads))}
    return subprocess.run(
        [sys.executable, *command], env=environment | variables, capture_output=True, text=True
    )


# --- train.py itself -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """What train.py told of a run."""

    task: Task
    launched: float  # seconds since 1970
    steps: list[dict]  # its step lines
    recompilations: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.task.speed([step["time"] for step in self.steps])

    @property
    def first_step_seconds(self) -> float:
        return self.steps[0]["time"] - self.launched

    @property
    def data_share(self) -> float:
        """Of the steps' time, what they stood still for their batches."""
        counted = self.steps[self.task.skipped :]
        waited = sum(step["data_seconds"] for step in counted)
        return waited / (waited + sum(step["step_seconds"] for step in counted))

    @property
    def peak_flops(self) -> float:
        """FLOP/s of the device that train.py knows, or measured; raises Missed."""
        step = self.steps[-1]
        if not step["mfu"]:
            raise Missed("the peak of this GPU is not known")
        return step["tflops_per_device"] * 1e12 / step["mfu"]

    @property
    def peak_memory_gib(self) -> float:
        return self.steps[-1]["peak_memory_gib"]


def settings_of(task: Task, corpus: Path, folder: str) -> dict[str, object]:
    """The keys that make train.py do a task, with nothing beside it."""
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


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Settings as train.py's command line has them."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def step_lines(folder: str | Path) -> list[dict]:
    """The steps of a run's metrics.jsonl, without its events."""
    text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "event" not in line]


def train(
    task: Task, corpus: Path, *, processes: int = 1, cache: str = "", **settings: object
) -> Trained:
    """train.py as a user runs it; `settings` have `__` for the dot, `cache` is the compiler's."""
    with tempfile.TemporaryDirectory() as folder:
        keys = settings_of(task, corpus, folder)
        keys |= {
            "training.local_batch_size": task.batch // processes,
            "training.global_batch_size": task.batch,
        }
        keys |= {key.replace("__", "."): value for key, value in settings.items()}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*(launch if processes > 1 else []), str(ROOT / "train.py"), *words_of(keys)]
        variables = {"TORCH_LOGS": "recompiles"} | (
            {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {}
        )
        launched = time.time()
        done = _start(command, CORES // processes, variables)
        if done.returncode:
            raise Missed(last_words(done.stderr) or f"train.py ended with {done.returncode}")
        recompiled = done.stderr.count("Recompiling function")
        return Trained(task, launched, step_lines(folder), recompiled)
