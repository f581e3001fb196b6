"""Straggler report: which ranks are slow by themselves, not because they wait for others.

In a step, all ranks wait for the slowest one in collectives, so the duration of a step is the same
everywhere. Compared are spans in which a rank waits for no other:

- host: CPU time of the training thread in a step. A thread that waits uses none. On a CPU, this is
  the time to compute the step; on a GPU, the time to launch it.
- data: time that the training thread waited for its batch.
- matmul, memory: a fixed matmul and, on a GPU, a fixed copy in device memory, timed at each report.
  On a CPU the ranks of a machine share its memory, so a copy says nothing about one rank.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median_low
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.distributed.mesh import Degrees
from titanlite.distributed.rank_tree import RankTree
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.metrics import PhaseTimer
from titanlite.training.periodic import PeriodicAction, StepInfo

NORMAL_SPREAD = 0.025  # of healthy ranks, as a standard deviation relative to their median
MAX_REPORTED = 8  # ranks in one report
SelfTest = Callable[[], dict[str, float]]  # seconds of each test


class SlowRank(NamedTuple):
    """A rank that is slow in one measure."""

    rank: int
    host: str
    measure: str  # host, data, matmul or memory
    seconds: float  # of this rank
    median_seconds: float  # of the ranks that do the same work
    z_score: float


def find_slow(seconds: Sequence[float], threshold: float, unit: float = 0.0) -> list[tuple]:
    """[(index, median, z-score)] of the values above `threshold`.

    The z-score is robust: from the median and the median absolute deviation (MAD, times 1.4826 for
    normally distributed values). Of an even number of values the lower median is used, so that with
    two the faster is the normal one. The standard deviation is at least `NORMAL_SPREAD` of the
    median, or of `unit` if that is larger.
    """
    median = median_low(seconds)
    mad = median_low([abs(value - median) for value in seconds])
    deviation = max(1.4826 * mad, NORMAL_SPREAD * max(median, unit))
    if not deviation:
        return []
    scores = [(index, median, (value - median) / deviation) for index, value in enumerate(seconds)]
    return [score for score in scores if score[2] >= threshold]


class StragglerMeter:
    """Times this rank's own work, and compares it with that of the others."""

    def __init__(self, degrees: Degrees, self_test: SelfTest, threshold: float, step: int):
        self.timers = {
            "host": PhaseTimer("step", thread_time),
            "data": PhaseTimer("data", perf_counter),
            "step": PhaseTimer("step", perf_counter),
        }  # to be added to the throughput meter, which calls them at each phase
        self._degrees, self._self_test, self._threshold = degrees, self_test, threshold
        self._last_step = step  # of the last report

    def start(self, step: int) -> None:
        """Forget what was timed since the last report; the run continues after `step`."""
        self._last_step = step
        for timer in self.timers.values():
            timer.take()

    def compare(self, step: int) -> list[SlowRank]:
        """The ranks that were slow since the last report, on rank 0; a collective of all ranks."""
        steps, self._last_step = max(1, step - self._last_step), step
        own: dict[str, Any] = {name: timer.take() / steps for name, timer in self.timers.items()}
        own |= {"name": socket.gethostname(), **self._self_test()}
        reports = [json.loads(text) for text in RankTree().gather(json.dumps(own).encode())]
        return compare_ranks(reports, self._degrees, self._threshold) if reports else []


def compare_ranks(
    reports: list[dict[str, Any]], degrees: Degrees, threshold: float
) -> list[SlowRank]:
    """The slow ranks, from the reports of all ranks in rank order; the slowest first.

    Host times are compared within a pipeline stage, data times relative to the time of a step.
    """
    everyone, per_stage = range(len(reports)), len(reports) // degrees.pipeline
    stages = [everyone[first : first + per_stage] for first in everyone[::per_stage]]
    step = median_low([report["step"] for report in reports])
    compared = [("host", stage, 0.0) for stage in stages]  # pipeline is the outermost dimension
    compared += [("data", everyone, step)]
    compared += [(test, everyone, 0.0) for test in ("matmul", "memory") if test in reports[0]]
    slow = [
        SlowRank(ranks[i], reports[ranks[i]]["name"], measure, seconds[i], median, z)
        for measure, ranks, unit in compared
        for seconds in [[reports[rank][measure] for rank in ranks]]
        for i, median, z in find_slow(seconds, threshold, unit)
    ]
    return sorted(slow, key=lambda rank: -rank.z_score)[:MAX_REPORTED]


def build_straggler_report(metered: MeteredRun) -> Meter | None:
    """Write the event `straggler` for each slow rank, every `straggler.freq` steps."""
    run, config = metered.run, metered.straggler
    degrees = run.step_settings.mesh.degrees
    if not config.freq or degrees.ranks == 1:
        return None
    self_test = partial(run_self_test, metered.sharded.compute_dtype, run.device)
    meter = StragglerMeter(degrees, self_test, config.threshold, run.state.step)
    run.throughput.add_timers(meter.timers.values())

    def report(info: StepInfo) -> None:
        for slow in meter.compare(info.step):
            run.sinks.event(info.step, "straggler", **slow._asdict())

    def is_due(info: StepInfo) -> bool:
        return info.step % config.freq == 0

    return Meter(PeriodicAction("straggler report", is_due, report, start=meter.start))


@torch.no_grad()
def run_self_test(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Seconds of a matmul in the compute dtype and, on a GPU, of a copy in its memory.

    They are the same on every rank. Each takes about a millisecond or more: shorter times differ by
    over 15 % on a healthy machine. Needs 128 MiB of a GPU's memory, and waits for it.
    """
    on_gpu = device.type == "cuda"
    size, calls = (2048, 20) if on_gpu else (512, 1)  # many calls, so that a launch is a small part

    def clock() -> float:
        if not on_gpu:
            return thread_time()
        torch.cuda.synchronize(device)
        return perf_counter()

    matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    seconds = {"matmul": fastest_time(lambda: matrix @ matrix, clock, calls)}
    if on_gpu:
        memory = torch.zeros(4 * size, size, dtype=torch.float32, device=device)
        seconds["memory"] = fastest_time(memory.clone, clock, calls)
    return seconds


def fastest_time(
    work: Callable[[], Tensor], clock: Callable[[], float], calls: int = 1, repetitions: int = 10
) -> float:
    """Seconds of a call in the fastest repetition, because disturbances only add time."""
    work()  # the first call allocates memory and loads the kernel
    seconds = []
    for _ in range(repetitions):
        started = clock()
        for _ in range(calls):
            work()
        seconds.append((clock() - started) / calls)
    return min(seconds)
