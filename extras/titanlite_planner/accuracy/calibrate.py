"""Fit the efficiency of a GPU type to a person's own runs, and say how far the estimate was off."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.errors import DataError
from titanlite.files import read_regular_file
from titanlite.job import read_job
from titanlite.metrics import METRICS_FILE
from titanlite.runtime.start_log import STARTS_FILE, read_starts
from titanlite_lab.run_metrics import read_metrics
from titanlite_planner.hardware import Cluster
from titanlite_planner.job_workload import workload_of
from titanlite_planner.time.efficiency import Efficiency, find_efficiency
from titanlite_planner.time.step import estimate_step
from titanlite_planner.workload import Workload

WARMUP_STEPS = 5  # compilation, autotuning and the first allocation of memory
SEARCH_FACTORS = (0.1, 0.03, 0.01)
CHANGE_PENALTY = 0.02  # of a number's squared log change: a few runs cannot fit all numbers


@dataclass(frozen=True)
class MeasuredRun:
    """A run of titanlite, with the median of its seconds per step."""

    folder: Path
    workload: Workload
    seconds: float
    steps: int


@dataclass(frozen=True)
class Calibration:
    """A fitted set, and the relative errors of the runs before and after."""

    efficiency: Efficiency
    before: list[float]
    after: list[float]


def read_measured_run(folder: Path) -> MeasuredRun:
    """The workload and speed of the run in a `job.dump_folder`. Raises DataError."""
    steps, _ = read_metrics(folder / METRICS_FILE)
    try:
        seconds = [record["step_seconds"] + record["data_seconds"] for record in steps]
    except (KeyError, TypeError):
        raise DataError(f'"{folder / METRICS_FILE}": has a step without its seconds.') from None
    settled = seconds[WARMUP_STEPS:] if len(seconds) > 2 * WARMUP_STEPS else seconds[1:]
    if not settled:
        raise DataError(
            f'"{folder}": has {len(seconds)} logged steps; the first is not representative.',
            fix="Give the folder of a run that logged two steps or more.",
        )
    starts = read_starts(read_regular_file(folder / STARTS_FILE))
    if not starts:
        raise DataError(f'"{folder}": {STARTS_FILE} has no start.')
    config = ["--job.config_file", str(folder / "config.toml")]
    job = read_job(config, starts[-1].ranks, here=False)
    return MeasuredRun(folder, workload_of(job), statistics.median(settled), len(settled))


def calibrate(runs: Sequence[MeasuredRun], cluster: Cluster) -> Calibration:
    """Fit the numbers that the runs depend on, starting from those of the GPU type.

    With one run, mostly the matmuls change; several runs of different sizes and layouts tell the
    numbers apart.
    """
    start = find_efficiency(cluster.gpu.name)

    def errors(efficiency: Efficiency) -> list[float]:
        return [
            estimate_step(run.workload, cluster, efficiency).total / run.seconds - 1 for run in runs
        ]

    def loss(efficiency: Efficiency) -> float:
        off = sum(abs(math.log1p(error)) for error in errors(efficiency))
        change = sum(
            math.log(value / getattr(start, name)) ** 2
            for name, value in dataclasses.asdict(efficiency).items()
        )
        return off + CHANGE_PENALTY * change

    best, lowest = start, loss(start)
    for step in SEARCH_FACTORS:
        improved = True
        while improved:
            improved = False
            for trial in _neighbours(best, step):
                found = loss(trial)
                if found < lowest - 1e-9:
                    best, lowest, improved = trial, found, True
    return Calibration(best, errors(start), errors(best))


def _neighbours(efficiency: Efficiency, step: float) -> list[Efficiency]:
    """The sets with one number, or all of them, larger or smaller by a factor."""
    values = dataclasses.asdict(efficiency)
    trials = [efficiency.scaled(factor) for factor in (1 + step, 1 / (1 + step))]
    for name, value in values.items():
        for factor in (1 + step, 1 / (1 + step)):
            trials.append(dataclasses.replace(efficiency, **{name: min(1.0, value * factor)}))
    return trials


def calibration_report(runs: Sequence[MeasuredRun], found: Calibration) -> str:
    """The errors before and after, and the set as a table for `efficiency.toml`."""
    lines = ["run, steps, seconds measured, error before, after"]
    for run, before, after in zip(runs, found.before, found.after, strict=True):
        lines.append(f"{run.folder}, {run.steps}, {run.seconds:.4g}, {before:+.1%}, {after:+.1%}")
    values = dataclasses.asdict(found.efficiency).items()
    return "\n".join([*lines, "", *(f"{name} = {value:.3f}" for name, value in values)])
