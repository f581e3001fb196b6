"""The idle time of pipeline ranks, and how blocks are divided into stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from titanlite.parallelize.schedule import build_schedule_order
from titanlite_planner.time.simulation import simulate_schedule, with_whole_backwards

MANY = 2  # micro-batches per rank beyond which the idle time does not grow


@lru_cache(maxsize=4096)
def divide_layers(layers: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Blocks of each stage; `first` and `last` are the costs of the ends, in blocks.

    Equal numbers where they divide, as frameworks do by default; otherwise the division whose most
    expensive stage is the cheapest.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    blocks, costs = [0] * stages, [0.0] * stages
    costs[0] += first
    costs[-1] += last
    for _ in range(layers):
        cheapest = min(range(stages), key=lambda stage: (costs[stage], -stage))
        blocks[cheapest] += 1
        costs[cheapest] += 1
    return tuple(blocks)


def idle_seconds(
    schedule: str,
    ranks: int,
    stages_per_rank: int,
    microbatches: int,
    costs: Sequence[float],
    splits_backward: bool = True,
) -> float:
    """Seconds by which a step is longer than the work of the busiest rank.

    `costs` has the seconds of one micro-batch on each rank: forward and backward of all its
    stages. GPipe and 1F1B fill and drain the pipeline once: every rank but the busiest adds its
    micro-batch. With v stages per rank, a micro-batch reaches the next rank v times earlier. For
    schedules that split the backward, the simulation of equal stages gives the idle time in units
    of a micro-batch; `splits_backward` as in Workload.
    """
    if ranks == 1:
        return 0.0
    others = sum(costs) - max(costs)
    if schedule in ("GPipe", "1F1B"):
        return others
    if schedule in ("Interleaved1F1B", "LoopedBFS", "csv"):  # a file's order: as if interleaved
        return others / stages_per_rank
    simulated = _simulable(schedule, ranks, min(microbatches, MANY * ranks))
    idle = simulated_idle(schedule, ranks, stages_per_rank, simulated, splits_backward)
    return idle * sum(costs) / ranks


@lru_cache(maxsize=4096)
def simulated_idle(
    schedule: str, ranks: int, stages_per_rank: int, microbatches: int, splits_backward: bool
) -> float:
    """Idle time of the schedule's simulation with equal stages, in units of one micro-batch's
    forward and backward on a rank."""
    stages = ranks * stages_per_rank
    order = build_schedule_order(schedule, ranks, stages, microbatches)
    order = order if splits_backward else with_whole_backwards(order)
    rows = simulate_schedule(order, [1.0] * stages)
    end = max(row[-1].end for row in rows)
    return (end - 3.0 * stages_per_rank * microbatches) / (3.0 * stages_per_rank)


def _simulable(schedule: str, ranks: int, microbatches: int) -> int:
    """About as many micro-batches, of which torch's schedule can run every number of ranks."""
    if schedule != "InterleavedZeroBubble":
        return microbatches
    return max(1, microbatches // ranks) * ranks
