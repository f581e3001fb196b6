"""Pipeline stages: what they have, on which rank, and how many micro-batches are in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from titanlite.parallelize.schedule import (
    SCHEDULES,
    PipelineAction,
    assign_stages,
    build_schedule_order,
)
from titanlite_planner.workload import Layout, ScheduleActions, Workload

MAX_SIMULATED_ROUNDS = 3  # with more, as many micro-batches are in flight


@dataclass(frozen=True)
class StageParts:
    """What one pipeline stage has: block numbers, and the modules at the ends."""

    number: int
    first_block: int
    blocks: int
    embedding: bool = False
    norm: bool = False
    output: bool = False


@lru_cache(256)
def _even_stages(blocks: tuple[int, ...]) -> tuple[StageParts, ...]:
    first, stages = 0, []
    for number, count in enumerate(blocks):
        last = number == len(blocks) - 1
        stages.append(StageParts(number, first, count, number == 0, last, last))
        first += count
    return tuple(stages)


def describe_stage(names: Sequence[str]) -> str:
    """Modules of a stage as text, such as "tok_embeddings, layers 0-3"."""
    parts: list[str] = []
    for path, group in groupby(names, lambda name: name.rpartition(".")[0]):
        last_parts = [name.rpartition(".")[2] for name in group]
        first_and_last = dict.fromkeys((last_parts[0], last_parts[-1]))
        parts += [f"{path} {'-'.join(first_and_last)}"] if path else last_parts
    return ", ".join(parts)


def stages_of(workload: Workload) -> tuple[StageParts, ...]:
    """The stages of a layout: the embedding in the first, the norm and the output in the last."""
    layout = workload.layout
    blocks = layout.stage_blocks
    if not blocks:
        count = layout.pipeline * layout.stages_per_rank
        each, rest = divmod(workload.model.n_layers, count)
        blocks = tuple(each + (stage < rest) for stage in range(count))
    return _even_stages(blocks)


def stage_ranks(layout: Layout) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    if layout.stage_ranks:
        return layout.stage_ranks
    return _assigned(layout.schedule, layout.pipeline, layout.pipeline * layout.stages_per_rank)


@lru_cache(256)
def _assigned(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    if schedule not in SCHEDULES:
        return tuple(stage % ranks for stage in range(stages))
    return tuple(assign_stages(SCHEDULES[schedule], ranks, stages))


@lru_cache(8192)  # a search asks for thousands, many of them again
def stages_in_flight(
    schedule: str, owners: tuple[int, ...], microbatches: int, actions: ScheduleActions = ()
) -> tuple[dict[int, int], ...]:
    """For each rank: micro-batches in flight of each of its stages, numbered in model order from 0.

    At the time when the sum over the rank's stages is largest. `actions`: of a schedule from a
    file. A schedule that is not known has at most as many in flight as 1F1B.
    """
    ranks, stages = max(owners) + 1, len(owners)
    if ranks == 1:
        return (dict.fromkeys(range(stages), 1),)
    own = [owned_stages(owners, rank) for rank in range(ranks)]
    if schedule in ("GPipe", "LoopedBFS"):
        return tuple(dict.fromkeys(range(len(each)), microbatches) for each in own)
    order: Sequence[Sequence[PipelineAction]] = actions
    if schedule in SCHEDULES:
        count = simulated_microbatches(ranks, microbatches)
        # empty if the number of micro-batches does not suit the schedule
        with contextlib.suppress(ValueError):
            order = build_schedule_order(schedule, ranks, stages, count)
    if order:
        return tuple(map(_most_alive, order, own))
    return tuple(
        dict.fromkeys(range(len(each)), min(microbatches, ranks - rank))
        for rank, each in enumerate(own)
    )


def simulated_microbatches(ranks: int, microbatches: int) -> int:
    """As many micro-batches as show what is in flight: all, or those of MAX_SIMULATED_ROUNDS.

    A round has `ranks` or more, as torch's interleaved schedules divide them.
    """
    rounds = max(1, microbatches // ranks)
    if rounds <= MAX_SIMULATED_ROUNDS:
        return microbatches
    return microbatches // rounds * MAX_SIMULATED_ROUNDS


def owned_stages(owners: Sequence[int], rank: int) -> list[int]:
    """The stages of a pipeline rank."""
    return [stage for stage, owner in enumerate(owners) if owner == rank]


def _most_alive(actions: Sequence[PipelineAction], own: list[int]) -> dict[int, int]:
    alive = dict.fromkeys(range(len(own)), 0)
    most, at_most = 0, dict(alive)
    position = {stage: index for index, stage in enumerate(own)}
    for action in actions:
        change = {"forward": 1, "backward": -1, "weight": -1}.get(action.kind, 0)
        if change:
            alive[position[action.stage]] += change
            if sum(alive.values()) > most:
                most, at_most = sum(alive.values()), dict(alive)
    return at_most
