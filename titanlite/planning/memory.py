"""Estimate the memory of every pipeline rank: bytes at rest, and the peak with what is alive then.

The rank of each stage that is described has coordinate 0 in the other dimensions of the mesh, and
so the largest shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from titanlite.parallelize.schedule import SCHEDULES, assign_stages, build_schedule_order
from titanlite.planning.activation_memory import BlockActivations, LossBytes, loss_bytes
from titanlite.planning.model_parts import (
    EMPTY,
    GroupBytes,
    ModelParts,
    group_bytes,
    parts_of_shape,
)
from titanlite.planning.workload import Layout, Workload

MAX_SIMULATED_ROUNDS = 3  # micro-batches simulated, times the stages: in flight are no more later
STAGES_GATHERED = 3  # of a rank, by torch's pipeline runtime


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank's device at the peak of a step."""

    rank: int
    parameters: float  # this rank's shards
    gradients: float  # likewise; after backward, but for those that exist at the peak
    optimizer_state: float
    gathered: float  # unsharded parameters, and communication buffers of FSDP
    unsharded_gradients: float  # that are not reduced yet
    activations: float  # of all micro-batches in flight, and temporaries of backward
    logits: float  # and the other tensors of the loss
    received: float  # buffers that pipeline stages receive into
    rest_gradients: float  # gradients after backward, which belong to `resting`
    at: str  # the point of the step

    @property
    def resting(self) -> float:
        """Parameters, gradients and optimizer state after backward."""
        return self.parameters + self.rest_gradients + self.optimizer_state

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.gathered
            + self.unsharded_gradients
            + self.activations
            + self.logits
            + self.received
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """The ranks of a pipeline, and the one that needs most memory."""

    ranks: tuple[RankMemory, ...]
    overhead: float = 1.0  # of the allocator: reserved bytes, per byte of the peak

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def total(self) -> float:
        """Reserved bytes of the worst rank."""
        return self.worst.total * self.overhead

    @property
    def reason(self) -> str:
        """Why the worst rank needs most."""
        worst = self.worst
        parts = {
            "parameters, gradients and optimizer state": worst.parameters
            + worst.gradients
            + worst.optimizer_state,
            "activations": worst.activations,
            "logits and loss": worst.logits,
            "parameters gathered by FSDP": worst.gathered,
            "gradients that are not reduced yet": worst.unsharded_gradients,
            "pipeline receive buffers": worst.received,
        }
        largest = max(parts, key=lambda name: parts[name])
        return f"pipeline rank {worst.rank}, {worst.at}: most are {largest}"


@dataclass(frozen=True)
class StageParts:
    """What one pipeline stage has: block numbers, and the modules at the ends."""

    first_block: int
    blocks: int
    embedding: bool = False
    norm: bool = False
    output: bool = False


def estimate_memory(
    workload: Workload,
    parts: ModelParts | None = None,
    stages: tuple[StageParts, ...] = (),
    on_cpu: bool = False,
) -> MemoryEstimate:
    """The memory of every pipeline rank.

    `parts` and `stages` default to those of `workload.model` and `workload.layout`.
    """
    layout = workload.layout
    parts = parts or parts_of_shape(workload.model)
    stages = stages or stages_of(workload)
    activations = BlockActivations(workload, on_cpu)
    owners = stage_ranks(layout)
    microbatches = layout.n_microbatches // max(1, layout.runs)
    if layout.schedule not in ("GPipe", "LoopedBFS"):  # in flight are no more later
        microbatches = min(microbatches, MAX_SIMULATED_ROUNDS * layout.pipeline)
    in_flight = stages_in_flight(layout.schedule, owners, microbatches)
    ranks = []
    for rank in range(layout.pipeline):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        estimator = _RankEstimate(
            workload, parts, activations, [stages[stage] for stage in own], in_flight[rank]
        )
        ranks.append(estimator.peak(rank))
    return MemoryEstimate(tuple(ranks))


@lru_cache(256)
def _even_stages(blocks: tuple[int, ...]) -> tuple[StageParts, ...]:
    first, stages = 0, []
    for number, count in enumerate(blocks):
        last = number == len(blocks) - 1
        stages.append(StageParts(first, count, number == 0, last, last))
        first += count
    return tuple(stages)


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


@lru_cache(8192)
def stages_in_flight(
    schedule: str, owners: tuple[int, ...], microbatches: int
) -> tuple[dict[int, int], ...]:
    """For each rank: its stages (in model order), and their micro-batches in flight at the most.

    Counted in stages, at the time when most are alive.
    """
    ranks, stages = max(owners) + 1, len(owners)
    if ranks == 1:
        return (dict.fromkeys(range(stages), 1),)
    if schedule not in SCHEDULES:  # a file; at most as many as with 1F1B
        return tuple(
            {0: min(microbatches, ranks - rank)} for rank in range(ranks)
        )
    count = min(microbatches, max(MAX_SIMULATED_ROUNDS * ranks, ranks))
    if schedule in ("GPipe", "LoopedBFS"):
        own = stages // ranks
        return tuple(dict.fromkeys(range(own), microbatches) for _ in range(ranks))
    count -= count % ranks if count > ranks else 0
    try:
        orders = build_schedule_order(schedule, ranks, stages, count)
    except ValueError:  # the number of micro-batches does not suit the schedule
        own = stages // ranks
        return tuple(
            dict.fromkeys(range(own), min(microbatches, ranks - rank)) for rank in range(ranks)
        )
    return tuple(
        _most_alive(actions, [s for s, owner in enumerate(owners) if owner == rank])
        for rank, actions in enumerate(orders)
    )


def _most_alive(actions, own: list[int]) -> dict[int, int]:
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


class _RankEstimate:
    """The estimate of one pipeline rank."""

    def __init__(
        self,
        workload: Workload,
        parts: ModelParts,
        activations: BlockActivations,
        stages: list[StageParts],
        in_flight: dict[int, int],
    ):
        self.workload, self.layout, self.numerics = workload, workload.layout, workload.numerics
        self.parts, self.activations = parts, activations
        self.stages, self.in_flight = stages, in_flight
        self.pipelined = self.layout.pipeline > 1
        self.block = self._group(parts.block)
        self.embedding = self._group(parts.embedding)
        self.after = self._group(parts.norm) + self._group(parts.output)
        self.has_embedding = any(stage.embedding for stage in stages)
        self.has_output = any(stage.output for stage in stages)
        self.norms = sum(stage.norm for stage in stages)
        self.all = self._all()

    def _group(self, parameters) -> GroupBytes:
        return group_bytes(parameters, self.layout, self.numerics.state_bytes)

    def _all(self) -> GroupBytes:
        total, experts = EMPTY, self.workload.model.experts
        dense = self._group(self.parts.dense_block) if experts else EMPTY
        for stage in self.stages:
            few = max(0, min(stage.blocks, experts.dense_layers - stage.first_block)) if experts else 0
            total = total + self.block.times(stage.blocks - few) + dense.times(few)
            if stage.embedding or (stage.output and self.parts.tied and self.pipelined):
                total = total + self.embedding
            if stage.norm:
                total = total + self._group(self.parts.norm)
            if stage.output:
                total = total + self._group(self.parts.output)
        return total

    def resting(self) -> tuple[float, float, float]:
        """Bytes of (parameters, gradients, optimizer state) on the device after backward."""
        numerics, total = self.numerics, self.all
        if self.workload.offload_parameters:
            return 0.0, 0.0, 0.0
        state = 0.0 if self.workload.offload_optimizer else total.state
        if self.layout.sharded == "parameters":
            grads = total.sharded * numerics.gradient_bytes
            return total.sharded * numerics.parameter_bytes, grads, state
        # a working copy of all parameters; the optimizer's own parameters are a part of its state
        own = numerics.parameter_bytes + numerics.state_bytes
        optimizer = own * (total.gathered if self.layout.sharded == "nothing" else total.stored)
        gradients = total.stored if self.layout.sharded == "gradients" else total.gathered
        return (
            total.gathered * numerics.gathered_bytes,
            gradients * numerics.gradient_bytes,
            0.0 if self.workload.offload_optimizer else optimizer,
        )

    def peak(self, rank: int) -> RankMemory:
        """The largest of the points of a step that can be the peak."""
        points = self._pipeline_points() if self.pipelined else self._points()
        parameters, gradients, state = self.resting()
        totals = []
        for at, values in points:
            values = {"gradients": 0.0, "gathered": 0.0, "unsharded_gradients": 0.0,
                      "activations": 0.0, "logits": 0.0, "received": 0.0, **values}
            if self.layout.sharded in ("nothing", "optimizer"):  # they exist all the time
                values |= {"gradients": gradients, "unsharded_gradients": 0.0, "gathered": 0.0}
            elif self.layout.sharded == "gradients":
                values |= {"gathered": 0.0}
            if self.workload.offload_parameters:
                values["gradients"] = 0.0
            totals.append(
                RankMemory(
                    rank, parameters, optimizer_state=state, rest_gradients=gradients, at=at, **values
                )
            )
        return max(totals, key=lambda memory: memory.total)

    def _loss(self) -> LossBytes:
        if not self.has_output:
            return LossBytes(0.0, 0.0, 0.0)
        output = self._group(self.parts.output or self.parts.embedding)
        chunked = self.layout.sharded == "parameters"
        return loss_bytes(self.activations, output.gathered, chunked)

    def _points(self) -> list[tuple[str, dict[str, float]]]:
        """Points of a step without pipeline parallelism."""
        numerics, acts = self.numerics, self.activations
        compute, reduce = numerics.gathered_bytes, numerics.reduce_bytes
        block, after, embedding = self.block, self.after, self.embedding
        blocks = self.stages[0].blocks
        saved = sum(acts.saved(number) for number in range(blocks))
        ends = acts.residual + acts.rope
        loss = self._loss()
        never = not self.layout.reshard_after_forward
        everything = self.all.gathered * compute
        accumulates = self.layout.n_microbatches > 1
        every = self.layout.reduce_every_microbatch
        shards = self.all.sharded * numerics.gradient_bytes if accumulates and every else 0.0
        unsharded = self.all.gathered * reduce if accumulates and not every else 0.0
        tied = self.parts.tied
        root = (embedding + after).gathered if tied else 0
        kept = root if tied else after.gathered
        at_loss = everything if never else (kept + block.gathered) * compute
        two = everything if never else (root + 2 * block.gathered) * compute
        grads_after = after.sharded * numerics.gradient_bytes
        points = [
            (
                "at the loss",
                {
                    "gradients": shards,
                    "unsharded_gradients": unsharded,
                    "gathered": at_loss,
                    "activations": saved + ends,
                    "logits": loss.saved + loss.forward_temporaries,
                },
            ),
            (
                "when backward begins",
                {
                    "gradients": shards,
                    "unsharded_gradients": unsharded,
                    "gathered": at_loss,
                    "activations": saved + ends,
                    "logits": loss.saved + loss.backward_temporaries,
                },
            ),
        ]
        # the reduce-scatter input of the group before is freed when the next group's begins
        for number, at in ((blocks - 1, "in the backward of the last block"), (0, "in the backward of the first block")):
            passed = blocks - 1 - number
            new = grads_after + passed * block.sharded * numerics.gradient_bytes
            before = (after.gathered if passed == 0 else block.gathered) * reduce
            alive = sum(acts.saved(n) for n in range(number + 1)) + acts.rope
            common = {
                "gradients": shards if shards else new,
            }
            points += [
                (
                    at,
                    common
                    | {
                        "unsharded_gradients": unsharded + before + block.gathered * compute / 3,
                        "gathered": two,
                        "activations": alive + acts.recomputed(number) + acts.backward_temporaries,
                    },
                ),
                (
                    at + ", at its reduce-scatter",
                    common
                    | {
                        "unsharded_gradients": unsharded
                        + block.gathered * (compute + reduce)
                        + block.sharded * reduce,
                        "gathered": two - (0 if never else block.gathered * compute),
                        "activations": alive - acts.saved(number) + 2 * acts.residual,
                    },
                ),
            ]
        first = self.workload.layout.tensor if self.workload.layout.tensor > 1 else 1
        gradient = embedding.gathered * first  # DTensor computes it for the whole vocabulary
        points.append(
            (
                "in the backward of the embedding",
                {
                    "gradients": shards or self.all.sharded * numerics.gradient_bytes,
                    "unsharded_gradients": unsharded
                    + gradient * compute
                    + (embedding.gathered + (after.gathered if tied else 0)) * reduce,
                    "gathered": everything if never else 0.0,
                    "activations": acts.residual + acts.rope,
                },
            )
        )
        return points

    def _pipeline_points(self) -> list[tuple[str, dict[str, float]]]:
        """Points of a step with pipeline parallelism."""
        numerics, acts, layout = self.numerics, self.activations, self.layout
        compute, reduce = numerics.gathered_bytes, numerics.reduce_bytes
        microbatches = layout.n_microbatches // max(1, layout.runs)
        loss = self._loss()
        in_flight = 0.0
        for index, stage in enumerate(self.stages):
            own = sum(acts.saved(stage.first_block + n) for n in range(stage.blocks))
            # a stage's output is kept until its backward; the loss is a scalar
            own += acts.rope + (loss.saved if stage.output else acts.residual)
            in_flight += own * self.in_flight.get(index, 1)
        received = 0.0
        last = self.workload.layout.pipeline * layout.stages_per_rank - 1
        for stage in self.stages:
            received += (not stage.embedding) + (not stage.output)
        received *= microbatches * acts.residual
        gathered = self.all.gathered * compute
        if layout.reshard_after_forward:
            gathered = 2 * self.block.gathered * compute
        tensor = layout.tensor if layout.tensor > 1 else 1
        extra = self.embedding.gathered * (tensor - 1) if self.has_embedding else 0
        grads = (self.all.gathered + extra) * reduce
        if layout.reshard_after_forward:
            grads = 0.0
        most = max(self.in_flight.values(), default=1)
        one = in_flight / max(1, sum(self.in_flight.values()))
        temporaries = acts.backward_temporaries + self.block.gathered * compute / 3
        recomputed = max(
            (acts.recomputed(s.first_block + n) for s in self.stages for n in range(s.blocks)),
            default=0.0,
        )
        shards = self.all.sharded * numerics.gradient_bytes if layout.runs > 1 else 0.0
        all_grads = microbatches > most
        common = {"gathered": gathered, "received": received, "gradients": shards}
        points = [
            (
                "in a backward with all micro-batches in flight",
                common
                | {
                    "unsharded_gradients": grads if all_grads else 0.0,
                    "activations": in_flight + temporaries + recomputed,
                    "logits": loss.backward_temporaries if self.has_output else 0.0,
                },
            ),
            (
                "in the second backward",
                common
                | {
                    "unsharded_gradients": grads,
                    "activations": max(0.0, in_flight - one) + temporaries + recomputed,
                },
            ),
            (
                "in the last backward of the embedding",
                common
                | {
                    "unsharded_gradients": grads
                    + (self.embedding.gathered * tensor * compute if self.has_embedding else 0.0),
                    "activations": in_flight - one if all_grads or most > 1 else 0.0,
                },
            ),
            (
                "when gradients are reduced",
                common
                | {
                    "gradients": self.all.sharded * numerics.gradient_bytes,
                    "unsharded_gradients": grads + self.block.gathered * reduce,
                },
            ),
        ]
        if self.has_output:
            points.append(
                (
                    "at the loss",
                    common
                    | {
                        "unsharded_gradients": grads if microbatches > 1 else 0.0,
                        "activations": in_flight,
                        "logits": loss.forward_temporaries,
                    },
                )
            )
        return points
