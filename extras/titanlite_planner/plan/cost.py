"""What a run costs: GPU-hours, money, energy, CO2, checkpoints, and time lost to failures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite_planner.accuracy.row_errors import model_flops
from titanlite_planner.hardware import Cluster
from titanlite_planner.time.step import StepTime, model_parameters
from titanlite_planner.workload import Workload

HOURS_BETWEEN_FAILURES = 50_700.0
# of one GPU: 419 unexpected interruptions in 54 days of 16,384 H100s (arXiv 2407.21783, table 5)
POWER_USAGE = 1.1  # power of a data centre, divided by that of its servers
CO2_KG_PER_KWH = 0.385  # US average; both as in LLaMA (arXiv 2302.13971, section 6)


@dataclass(frozen=True)
class CostAssumptions:
    """What the cost of a run depends on beside its hardware."""

    dollars_per_gpu_hour: float | None = None  # None: the list price in the hardware file
    co2_kg_per_kwh: float = CO2_KG_PER_KWH
    power_usage: float = POWER_USAGE
    gpu_hours_between_failures: float = HOURS_BETWEEN_FAILURES
    checkpoint_seconds: float = 30.0  # for which saving stops training
    restart_seconds: float = 600.0  # until training goes on after a failure
    checkpoints_kept: int = 3


@dataclass(frozen=True)
class FailureCost:
    """Time lost to failures, with checkpoints at the interval that loses least."""

    hours_between_failures: float  # of the whole cluster
    young_s: float  # optimal seconds between checkpoints, first order
    daly_s: float  # and of higher order, which is used
    lost_fraction: float  # of the time: saving, repeated steps and restarts


@dataclass(frozen=True)
class RunCost:
    """The cost of training for a number of tokens."""

    tokens: float
    steps: int
    mfu: float  # causal model FLOP/s, divided by the peak in the precision of the matmuls
    days: float  # with the time lost to failures
    gpu_hours: float
    dollars: float | None
    kwh: float | None
    co2_tonnes: float | None
    checkpoint_gib: float  # of one checkpoint
    stored_gib: float
    failures: FailureCost


def estimate_cost(
    workload: Workload,
    cluster: Cluster,
    step: StepTime,
    tokens: float,
    assumptions: CostAssumptions | None = None,
) -> RunCost:
    """The cost of training for `tokens` tokens at the speed of `step`."""
    assumed = assumptions or CostAssumptions()
    layout = workload.layout
    steps = math.ceil(tokens / (layout.global_batch * workload.seq_len))
    failures = failure_cost(
        assumed.gpu_hours_between_failures / layout.gpus,
        assumed.checkpoint_seconds,
        assumed.restart_seconds,
    )
    hours = steps * step.total / 3600 / (1 - failures.lost_fraction)
    gpu_hours = hours * layout.gpus
    price = assumed.dollars_per_gpu_hour or cluster.dollars_per_hour
    watts = cluster.machine.watts or cluster.gpu.watts
    kwh = watts and gpu_hours * watts / 1000 * assumed.power_usage
    numerics = workload.numerics
    bytes_stored = numerics.parameter_bytes + numerics.state_bytes
    checkpoint = model_parameters(workload.model) * bytes_stored / 2**30
    return RunCost(
        tokens=tokens,
        steps=steps,
        mfu=model_flops_utilisation(workload, cluster, step),
        days=hours / 24,
        gpu_hours=gpu_hours,
        dollars=price and gpu_hours * price,
        kwh=kwh,
        co2_tonnes=kwh and kwh * assumed.co2_kg_per_kwh / 1000,
        checkpoint_gib=checkpoint,
        stored_gib=checkpoint * assumed.checkpoints_kept,
        failures=failures,
    )


def model_flops_utilisation(workload: Workload, cluster: Cluster, step: StepTime) -> float:
    """Causal model FLOPs of a step, divided by those that the GPUs could compute in its time."""
    peak = cluster.gpu.peak_flops(workload.numerics.matmuls)
    return model_flops(workload) / (workload.layout.gpus * peak * step.total)


def failure_cost(hours_between_failures: float, save_s: float, restart_s: float) -> FailureCost:
    """The optimal interval between checkpoints and what is lost with it.

    Young: sqrt(2 d M), for saves of d seconds and M seconds between failures
    (https://doi.org/10.1145/361147.361115). Daly, of higher order, or M if d >= 2 M
    (https://doi.org/10.1016/j.future.2004.11.016, equation 37). Lost: the saves, half of an
    interval for each failure, and the restarts.
    """
    between = hours_between_failures * 3600
    young = math.sqrt(2 * save_s * between)
    ratio = save_s / (2 * between)
    if ratio >= 1:
        daly = between
    else:
        daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
    daly = max(daly, 1.0)
    lost = save_s / (daly + save_s) + (daly + save_s) / 2 / between + restart_s / between
    return FailureCost(hours_between_failures, young, daly, min(0.99, lost))
