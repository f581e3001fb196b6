"""Estimate the memory of every pipeline rank: bytes at rest, and the peak with what is alive then.

The ranks that are described have coordinate 0 in the other dimensions of the mesh, and so the
largest shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from operator import attrgetter

from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.memory.model_parts import ModelParts, parts_of_shape
from titanlite_planner.memory.pipeline_points import pipeline_points
from titanlite_planner.memory.rank import MemoryEstimate, RankMemory, StepPoint
from titanlite_planner.memory.rank_parts import LayoutParts, RankParts
from titanlite_planner.memory.schedule_states import schedule_states
from titanlite_planner.memory.step_points import step_points
from titanlite_planner.stages import StageParts, stage_ranks, stages_of
from titanlite_planner.workload import Workload


def estimate_memory(
    workload: Workload,
    parts: ModelParts | None = None,
    stages: tuple[StageParts, ...] = (),
    on_cpu: bool = False,
    step_temporaries: tuple[float, float] = (0.0, 0.0),
) -> MemoryEstimate:
    """The memory of every pipeline rank.

    `parts` and `stages` default to those of `workload.model` and `workload.layout`;
    `step_temporaries`: what the optimizer's step allocates and frees, in bytes, and in multiples of
    the largest shard of a parameter.
    """
    ranks = []
    for rank, own in enumerate(_ranks(workload, parts, stages, on_cpu)):
        points = [*_points(rank, own), _optimizer_step(own, step_temporaries)]
        ranks.append(max((_at_point(rank, own, point) for point in points), key=_total))
    return MemoryEstimate(tuple(ranks))


def first_too_large(workload: Workload, limit: float) -> float | None:
    """Bytes of a rank at a point where it needs more than `limit`; None if there is none."""
    for rank, own in enumerate(_ranks(workload)):
        for point in itertools.chain(_points(rank, own), [_optimizer_step(own, (0.0, 0.0))]):
            needed = _at_point(rank, own, point).total
            if needed > limit:
                return needed
    return None


def _ranks(
    workload: Workload,
    parts: ModelParts | None = None,
    stages: tuple[StageParts, ...] = (),
    on_cpu: bool = False,
) -> Iterator[RankParts]:
    """What each pipeline rank has."""
    own: list[list[StageParts]] = [[] for _ in range(workload.layout.pipeline)]
    for stage, owner in zip(
        stages or stages_of(workload), stage_ranks(workload.layout), strict=True
    ):
        own[owner].append(stage)
    activations = BlockActivations(workload, on_cpu)
    common = LayoutParts(workload, parts or parts_of_shape(workload.model), activations)
    return (RankParts(common, each) for each in own)


def _points(rank: int, parts: RankParts) -> Iterator[StepPoint]:
    """The points of forward and backward at which a rank can be at its peak."""
    layout = parts.layout
    if layout.pipeline == 1:
        return iter(step_points(parts))
    microbatches = layout.n_microbatches // max(1, layout.runs)
    owners = stage_ranks(layout)
    splits = parts.workload.splits_backward
    states = schedule_states(layout.schedule, owners, microbatches, layout.actions, splits)
    return pipeline_points(parts, states[rank], microbatches)


def _optimizer_step(parts: RankParts, step_temporaries: tuple[float, float]) -> StepPoint:
    size, multiple = step_temporaries
    if multiple:
        size = max(size, multiple * parts.largest_shard * parts.numerics.parameter_bytes)
    return StepPoint("in the optimizer's step", gradients=parts.resting[1], step_temporaries=size)


def _at_point(rank: int, parts: RankParts, point: StepPoint) -> RankMemory:
    """The memory of a rank at one point of the step."""
    parameters, gradients, state = parts.resting
    point = _existing(point, parts)
    return RankMemory(
        rank,
        parameters,
        point.gradients,
        state,
        point.gathered,
        point.unsharded_gradients,
        point.activations + _batch_bytes(parts.workload),
        point.logits,
        point.received,
        point.step_temporaries,
        gradients,
        point.at,
    )


_total = attrgetter("total")


def _existing(point: StepPoint, parts: RankParts) -> StepPoint:
    """The point, with the gradients and gathered parameters that exist under the workload."""
    workload, sharded = parts.workload, parts.layout.sharded
    if sharded in ("nothing", "optimizer"):  # they exist all the time
        gradients = parts.resting[1]
        point = point._replace(gradients=gradients, unsharded_gradients=0.0, gathered=0.0)
    elif sharded == "gradients":
        point = point._replace(gathered=0.0)
    if workload.step_in_backward:  # of one group, as it is reduced
        point = point._replace(gradients=min(point.gradients, parts.largest_group_gradient))
    if workload.offload_parameters:
        point = point._replace(gradients=0.0)
    return point


def _batch_bytes(workload: Workload) -> float:
    """Tokens and labels of a rank's sequences, which the context ranks all have."""
    layout = workload.layout
    return 2 * 8 * layout.micro_batch * layout.n_microbatches * workload.seq_len
