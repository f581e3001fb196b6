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
import math
import socket
from collections.abc import Callable, Sequence
from statistics import median_low
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.distributed.mesh import Degrees, coordinates_of
from titanlite.distributed.rank_tree import RankTree
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.metrics import PhaseTimer
from titanlite.training.periodic import PeriodicAction, StepInfo

NORMAL_SPREAD = 0.025  # of healthy ranks, as a standard deviation relative to their median
MAX_REPORTED = 8  # ranks in one report


class SlowRank(NamedTuple):
    """A rank that is slow in one measure."""

    rank: int
    host: str
    measure: str  # host, data, matmul or memory
    seconds: float  # of this rank
    median_seconds: float  # of the ranks that do the same work
    z_score: float


def find_slow(seconds: Sequence[float], threshold: float, unit: float = 0.0) -> list[tuple]:
    """[(index, median, z-score)] of the values above `threshold`, the slowest first.

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
    slow = [score for score in scores if score[2] >= threshold]
    return sorted(slow, key=lambda score: -score[2])


class StragglerMeter:
    """Times this rank's own work, and compares it with that of the others."""

    def __init__(self, degrees: Degrees, self_test: SelfTest, threshold: float, step: int):
        self.host, self.data = PhaseTimer("step", thread_time), PhaseTimer("data", perf_counter)
        self._step = PhaseTimer("step", perf_counter)
        self._degrees, self._self_test, self._threshold = degrees, self_test, threshold
        self._last_step = step  # of the last report

    @property
    def timers(self) -> tuple[PhaseTimer, ...]:
        """To be added to the throughput meter, which calls them at each phase."""
        return self.host, self.data, self._step

    def start_again(self, step: int) -> None:
        """Forget what was timed since the last report; the run continues after `step`."""
        self._last_step = step
        for timer in self.timers:
            timer.take()

    def compare(self, step: int) -> list[SlowRank]:
        """The ranks that were slow since the last report, on rank 0; a collective of all ranks."""
        steps, self._last_step = max(1, step - self._last_step), step
        own = {
            "name": socket.gethostname(),
            "step": self._step.take() / steps,
            "host": self.host.take() / steps,
            "data": self.data.take() / steps,
            **self._self_test.run(),
        }
        reports = [json.loads(text) for text in RankTree().gather(json.dumps(own).encode())]
        return compare_ranks(reports, self._degrees, self._threshold) if reports else []


def compare_ranks(
    reports: list[dict[str, Any]], degrees: Degrees, threshold: float
) -> list[SlowRank]:
    """The slow ranks, from the reports of all ranks in rank order; the slowest first.

    Host times are compared between the ranks of a pipeline stage, because stages have different
    work. Data times count relative to the duration of a step.
    """
    everyone = range(len(reports))
    stages: dict[int, list[int]] = {}
    for rank in everyone:
        stages.setdefault(coordinates_of(rank, degrees)["pipeline"], []).append(rank)
    step = median_low([report["step"] for report in reports])
    compared: list[tuple[str, Sequence[int], float]] = [("host", s, 0.0) for s in stages.values()]
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
    self_test = SelfTest(metered.sharded.compute_dtype, run.device)
    meter = StragglerMeter(degrees, self_test, config.threshold, run.state.step)
    run.meter.add_timers(meter.timers)

    def report(info: StepInfo) -> None:
        for slow in meter.compare(info.step):
            run.sinks.event(info.step, "straggler", **slow._asdict())

    def is_due(info: StepInfo) -> bool:
        return info.step % config.freq == 0

    return Meter(PeriodicAction("straggler report", is_due, report, start_again=meter.start_again))


class SelfTest:
    """A matmul in the compute dtype and, on a GPU, a copy in its memory, the same on every rank.

    The fastest of a few repetitions counts, because disturbances only add time. Each takes
    about a millisecond or more: shorter times differ by over 15 % on a healthy machine. It needs
    128 MiB of a GPU's memory while it runs.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device

    @torch.no_grad()
    def run(self) -> dict[str, float]:
        """Seconds of each test; waits for the device."""
        size = 2048 if self._device.type == "cuda" else 512
        matrix = torch.full((size, size), 1 / size, dtype=self._dtype, device=self._device)
        seconds = {"matmul": self._time(lambda: matrix @ matrix)}
        if self._device.type == "cuda":
            memory = torch.zeros(4 * size, size, dtype=torch.float32, device=self._device)
            seconds["memory"] = self._time(memory.clone)
        return seconds

    def _time(self, work: Callable[[], Tensor], repetitions: int = 10) -> float:
        fastest = math.inf
        calls = 20 if self._device.type == "cuda" else 1  # so that a launch is a small part
        work()  # the first call allocates memory and loads the kernel
        for _ in range(repetitions):
            started = self._now()
            for _ in range(calls):
                work()
            fastest = min(fastest, (self._now() - started) / calls)
        return fastest

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return perf_counter()
        return thread_time()
