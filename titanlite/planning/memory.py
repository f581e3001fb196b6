"""Estimate the memory of every pipeline rank: bytes at rest, and the peak with what is alive then.

The ranks that are described have coordinate 0 in the other dimensions of the mesh, and so the
largest shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from titanlite.planning.activation_memory import BlockActivations
from titanlite.planning.model_parts import ModelParts, parts_of_shape
from titanlite.planning.pipeline_points import pipeline_points
from titanlite.planning.rank_memory import MemoryEstimate, RankMemory, StepPoint
from titanlite.planning.rank_parts import LayoutParts, RankParts
from titanlite.planning.schedule_states import schedule_states
from titanlite.planning.stages import StageParts, stage_ranks, stages_of
from titanlite.planning.step_points import step_points
from titanlite.planning.workload import Workload


def estimate_memory(
    workload: Workload,
    parts: ModelParts | None = None,
    stages: tuple[StageParts, ...] = (),
    on_cpu: bool = False,
    step_temporaries: tuple[float, float] = (0.0, 0.0),
) -> MemoryEstimate:
    """The memory of every pipeline rank.

    Arguments are those of `rank_memories`.
    """
    arguments = parts, stages, on_cpu, step_temporaries
    return MemoryEstimate(tuple(rank_memories(workload, *arguments)))


def rank_memories(
    workload: Workload,
    parts: ModelParts | None = None,
    stages: tuple[StageParts, ...] = (),
    on_cpu: bool = False,
    step_temporaries: tuple[float, float] = (0.0, 0.0),
) -> Iterator[RankMemory]:
    """The memory of one pipeline rank after the other.

    `parts` and `stages` default to those of `workload.model` and `workload.layout`;
    `step_temporaries`: what the optimizer's step allocates and frees, in bytes, and in multiples of
    the largest shard of a parameter.
    """
    layout = workload.layout
    parts = parts or parts_of_shape(workload.model)
    stages = stages or stages_of(workload)
    activations = BlockActivations(workload, on_cpu)
    owners = stage_ranks(layout)
    microbatches = layout.n_microbatches // max(1, layout.runs)
    own: list[list[StageParts]] = [[] for _ in range(layout.pipeline)]
    for stage, owner in zip(stages, owners, strict=True):
        own[owner].append(stage)
    common = LayoutParts(workload, parts, activations)
    for rank in range(layout.pipeline):
        rank_parts = RankParts(common, own[rank])
        if layout.pipeline > 1:
            states = schedule_states(layout.schedule, owners, microbatches)[rank]
            points = pipeline_points(rank_parts, states, microbatches)
        else:
            points = step_points(rank_parts)
        points.append(_optimizer_step(rank_parts, step_temporaries))
        yield _peak(rank, rank_parts, points)


def _optimizer_step(parts: RankParts, step_temporaries: tuple[float, float]) -> StepPoint:
    size, multiple = step_temporaries
    if multiple:
        size = max(size, multiple * parts.largest_shard * parts.numerics.parameter_bytes)
    return StepPoint("in the optimizer's step", gradients=parts.resting[1], step_temporaries=size)


def _peak(rank: int, parts: RankParts, points: list[StepPoint]) -> RankMemory:
    """The largest of the points."""
    parameters, gradients, state = parts.resting
    batch = _batch_bytes(parts.workload)

    def memory(point: StepPoint) -> RankMemory:
        return RankMemory(
            rank,
            parameters,
            point.gradients,
            state,
            point.gathered,
            point.unsharded_gradients,
            point.activations + batch,
            point.logits,
            point.received,
            point.step_temporaries,
            gradients,
            point.at,
        )

    return max([memory(_existing(point, parts)) for point in points], key=_total)


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
