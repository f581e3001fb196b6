"""Fit the efficiency set of each GPU type to published runs, and cross-validate it.

python -m benchmarks.planner_fit                    # print the sets and their errors
python -m benchmarks.planner_fit --write            # write the planner's time/efficiency.toml
python -m benchmarks.planner_fit --cross-validate   # errors of one half, fitted to the other
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from titanlite_planner.accuracy.published_rows import read_row
from titanlite_planner.hardware import Cluster
from titanlite_planner.time.efficiency import Efficiency
from titanlite_planner.time.step import estimate_step
from titanlite_planner.workload import Workload

RUNS = Path(__file__).parent / "published_runs.csv"
TOML = Path(__file__).parents[1] / "extras/titanlite_planner/time/efficiency.toml"
PRIOR = Efficiency(
    matmul=0.65, attention=0.55, memory=0.75, link=0.75, network=0.75, float8=0.55, float4=0.45
)
PRIOR_WEIGHT = 0.5  # rows that each number's distance from the prior counts as, in ln units x 10
UPPER = {"link": 0.85, "network": 0.95}
# NCCL reaches 370 of 450 GB/s over NVLink on an H100 (nccl-tests, all-reduce), 48 of 50 on 400 Gb/s
LOWEST, HIGHEST = 0.1, 0.95
STEPS = (0.15, 0.05, 0.02, 0.005)


class Measured(NamedTuple):
    """A row with its measured seconds."""

    row: dict[str, str]
    workload: Workload
    cluster: Cluster
    seconds: float

    @property
    def weight(self) -> float:
        return 1.0

    @property
    def moe(self) -> bool:
        return self.workload.model.experts is not None


def measured_rows(path: Path = RUNS) -> list[Measured]:
    """The rows that have a step time and all that its estimate needs."""
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            run = read_row(row)
            try:
                seconds = float(row["step_s"])
            except ValueError:
                continue
            if not isinstance(run, str) and not run.untimed:
                found.append(Measured(row, run.workload, run.cluster, seconds))
    return found


def log_error(measured: Measured, efficiency: Efficiency) -> float:
    """Logarithm of estimated by measured seconds."""
    step = estimate_step(measured.workload, measured.cluster, efficiency)
    return math.log(step.total / measured.seconds)


def fit(rows: Sequence[Measured], start: Efficiency = PRIOR) -> Efficiency:
    """The set with the least sum of absolute log errors, weakly held to the prior."""
    sources = Counter(measured.row["framework"] for measured in rows)

    def objective(efficiency: Efficiency) -> float:
        loss = 0.0
        for measured in rows:
            error = abs(log_error(measured, efficiency))
            loss += min(error, 0.05 + 0.7 * error) / math.sqrt(sources[measured.row["framework"]])
        for name, value in dataclasses.asdict(efficiency).items():
            loss += 0.3 * math.log(value / getattr(PRIOR, name)) ** 2
        return loss

    best, lowest = start, objective(start)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for name in dataclasses.asdict(best):
                for factor in (1 + step, 1 / (1 + step)):
                    upper = UPPER.get(name, HIGHEST)
                    value = min(upper, max(LOWEST, getattr(best, name) * factor))
                    trial = dataclasses.replace(best, **{name: value})
                    loss = objective(trial)
                    if loss < lowest - 1e-6:
                        best, lowest, improved = trial, loss, True
    return best


def summary(errors: Sequence[float]) -> str:
    """Median, and the fraction within 20 %, of relative errors."""
    absolute = [abs(error) for error in errors]
    within = sum(error <= 0.2 for error in absolute) / len(absolute)
    return f"{len(errors):4d} rows  median {statistics.median(absolute):5.1%}  ±20% {within:4.0%}"


def kind_of(measured: Measured) -> str:
    """dense bf16, dense fp8, … or MoE."""
    if measured.moe:
        return "MoE"
    return {"bfloat16": "bf16", "float8": "fp8", "float4": "fp4"}[
        measured.workload.numerics.matmuls
    ]


CPU = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # of rates that are measured, not published
LIKE = {"B300": "B200", "H100-PCIe": "H100"}  # types without dense rows take another's set


def write_sets(sets: dict[str, Efficiency], counts: dict[str, int], path: Path = TOML) -> None:
    """Write `efficiency.toml`."""
    lines = [
        "# The fraction of published peaks that a GPU reaches, by GPU type.",
        "# Written by `python -m benchmarks.planner_fit --write`: least absolute log errors of the",
        "# dense rows of benchmarks/published_runs.csv, each framework weighted by the root of its",
        "# rows, weakly held to the set of types that were not fitted (default). What no row of a",
        "# type depends on is that of the default: float4 of a GPU without it, for example.",
    ]
    for name, efficiency in {"default": PRIOR, "CPU": CPU, **sets}.items():
        lines += ["", f"[efficiency.{name}]" + _comment(name, counts)]
        lines += [f"{key} = {value:.3f}" for key, value in dataclasses.asdict(efficiency).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _comment(name: str, counts: dict[str, int]) -> str:
    if name in LIKE:
        return f"  # not fitted: that of {LIKE[name]}"
    return f"  # {counts[name]} rows" if name in counts else "  # not fitted"


def source_of(measured: Measured) -> str:
    """The publication that a row is from; lines and sections of one document are one source."""
    source = re.sub(r" line \d+.*", "", measured.row["source"])
    return re.sub(r"golden_values_.*|[\w-]+/golden.*", "", source)


def cross_validate(rows: Sequence[Measured]) -> dict[str, list[float]]:
    """Errors of each half of the sources with the sets fitted to the other half, by kind of row.

    A GPU type whose rows are all in one half is predicted with the prior.
    """
    sources = sorted({source_of(measured) for measured in rows})
    half_of = {source: number % 2 for number, source in enumerate(sources)}
    errors: dict[str, list[float]] = {}
    for gpu in dict.fromkeys(measured.cluster.gpu.name for measured in rows):
        of_gpu = [m for m in rows if m.cluster.gpu.name == gpu and not m.moe]
        for half in (0, 1):
            fitted = [m for m in of_gpu if half_of[source_of(m)] == half]
            tested = [m for m in of_gpu if half_of[source_of(m)] != half]
            efficiency = fit(fitted) if fitted else PRIOR
            for measured in tested:
                kind = kind_of(measured) + (" (fitted)" if fitted else " (GPU type not seen)")
                errors.setdefault(kind, []).append(math.expm1(log_error(measured, efficiency)))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=RUNS)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cross-validate", action="store_true")
    arguments = parser.parse_args()
    rows = measured_rows(arguments.rows)
    if arguments.cross_validate:
        for name, values in sorted(cross_validate(rows).items()):
            print(f"{name:30s} {summary(values)}  mean {statistics.mean(values):+.1%}")
        return
    errors: dict[str, list[float]] = {}
    sets: dict[str, Efficiency] = {}
    counts: dict[str, int] = {}
    for gpu in dict.fromkeys(m.cluster.gpu.name for m in rows):
        dense = [m for m in rows if m.cluster.gpu.name == gpu and not m.moe]
        if not dense:
            continue
        best = fit(dense)
        sets[gpu], counts[gpu] = best, len(dense)
        print(gpu, {k: round(v, 3) for k, v in dataclasses.asdict(best).items()})
        for m in dense:
            errors.setdefault(f"{kind_of(m)}", []).append(math.exp(log_error(m, best)) - 1)
            errors.setdefault(f"   {kind_of(m)} {gpu} {m.row['framework'][:16]}", []).append(
                math.exp(log_error(m, best)) - 1
            )
    sets |= {name: sets[like] for name, like in LIKE.items() if like in sets}
    if arguments.write:
        write_sets(sets, counts)
    for name, values in sorted(errors.items()):
        print(f"{name:50s} {summary(values)}  mean {statistics.mean(values):+.1%}")


if __name__ == "__main__":
    main()
