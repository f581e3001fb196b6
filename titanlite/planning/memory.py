"""Estimate the memory of every pipeline rank: bytes at rest, and the peak with what is alive then.

The ranks that are described have coordinate 0 in the other dimensions of the mesh, and so the
largest shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.planning.activation_memory import BlockActivations, LossBytes, loss_bytes
from titanlite.planning.model_parts import (
    EMPTY,
    GroupBytes,
    ModelParts,
    group_bytes,
    parts_of_shape,
)
from titanlite.planning.stages import (
    MAX_SIMULATED_ROUNDS,
    StageParts,
    stage_ranks,
    stages_in_flight,
    stages_of,
)
from titanlite.planning.workload import Workload


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank's device at the peak of a step."""

    rank: int
    parameters: float  # this rank's shards
    gradients: float  # likewise, as far as they exist at the peak
    optimizer_state: float
    gathered: float  # unsharded parameters, and communication buffers of FSDP
    unsharded_gradients: float  # that are not reduced yet
    activations: float  # of all micro-batches in flight, and temporaries of backward
    logits: float  # and the other tensors of the loss
    received: float  # buffers that pipeline stages receive into
    step_temporaries: float  # of the optimizer's step
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
            + self.step_temporaries
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """The ranks of a pipeline, and the one that needs most memory."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def total(self) -> float:
        """Bytes of the tensors of the worst rank at its peak."""
        return self.worst.total

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
            "temporaries of the optimizer": worst.step_temporaries,
        }
        largest = max(parts, key=lambda name: parts[name])
        return f"pipeline rank {worst.rank}, {worst.at}: most are {largest}"


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
    layout = workload.layout
    parts = parts or parts_of_shape(workload.model)
    stages = stages or stages_of(workload)
    activations = BlockActivations(workload, on_cpu)
    owners = stage_ranks(layout)
    microbatches = layout.n_microbatches // max(1, layout.runs)
    if layout.schedule not in ("GPipe", "LoopedBFS"):  # more would not be in flight at once
        microbatches = min(microbatches, MAX_SIMULATED_ROUNDS * layout.pipeline)
    in_flight = stages_in_flight(layout.schedule, owners, microbatches)
    ranks = []
    for rank in range(layout.pipeline):
        own = [stage for stage, owner in enumerate(owners) if owner == rank]
        estimator = _RankEstimate(
            workload, parts, activations, [stages[stage] for stage in own], in_flight[rank]
        )
        ranks.append(estimator.peak(rank, step_temporaries))
    return MemoryEstimate(tuple(ranks))


_VARYING = (
    "gradients",
    "gathered",
    "unsharded_gradients",
    "activations",
    "logits",
    "received",
    "step_temporaries",
)


Point = tuple[
    str, dict[str, float]
]  # a point of a step, and the fields of `RankMemory` that differ


def _point(at: str, **values: float) -> Point:
    return at, values


@dataclass(frozen=True)
class _PipelineState:
    """Bytes of a pipeline rank."""

    in_flight: float  # saved by all forwards in flight
    one: float  # by one of them
    gradients: float  # unsharded gradients after the first backward
    early: float  # those that exist while most forwards are in flight
    of_blocks: float  # without the embedding's


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
            few = (
                max(0, min(stage.blocks, experts.dense_layers - stage.first_block))
                if experts
                else 0
            )
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

    def peak(self, rank: int, step_temporaries: tuple[float, float]) -> RankMemory:
        """The largest of the points of a step that can be the peak."""
        points = self._pipeline_points() if self.pipelined else self._points()
        parameters, gradients, state = self.resting()
        size, multiple = step_temporaries
        size = max(size, multiple * self._largest_shard() * self.numerics.parameter_bytes)
        points.append(_point("in the optimizer's step", gradients=gradients, step_temporaries=size))
        totals = []
        for at, values in points:
            values = dict.fromkeys(_VARYING, 0.0) | values
            if self.layout.sharded in ("nothing", "optimizer"):  # they exist all the time
                values |= {"gradients": gradients, "unsharded_gradients": 0.0, "gathered": 0.0}
            elif self.layout.sharded == "gradients":
                values |= {"gathered": 0.0}
            if self.workload.step_in_backward:  # of one group, as it is reduced
                values["gradients"] = min(values["gradients"], self._largest_group_gradient())
            if self.workload.offload_parameters:
                values["gradients"] = 0.0
            totals.append(
                RankMemory(
                    rank,
                    parameters,
                    optimizer_state=state,
                    rest_gradients=gradients,
                    at=at,
                    **values,
                )
            )
        return max(totals, key=lambda memory: memory.total)

    def _largest_group_gradient(self) -> float:
        groups = (self.block, self.embedding, self.after)
        return max(group.sharded for group in groups) * self.numerics.gradient_bytes

    def _loss(self) -> LossBytes:
        if not self.has_output:
            return LossBytes(0.0, 0.0, 0.0)
        output = self._group(self.parts.output or self.parts.embedding)
        chunked = self.layout.sharded == "parameters"
        return loss_bytes(self.activations, output.gathered, chunked)

    def _embedding_gradient(self, compute: float) -> float:
        """Bytes of the embedding's gradient, which DTensor computes for the whole vocabulary."""
        if not self.has_embedding:
            return 0.0
        # on a CPU it is summed in fp32 first; see TokenEmbedding
        size = compute + (4 if self.activations.on_cpu and compute < 4 else 0)
        return self.embedding.gathered * self.layout.tensor * size

    def _largest_shard(self) -> int:
        """Elements of the largest parameter's shard on this rank."""
        parts = [*self.parts.block]
        parts += self.parts.embedding if self.has_embedding else ()
        parts += self.parts.output if self.has_output else ()
        return max(self._group((parameter,)).stored for parameter in parts)

    def _points(self) -> list[Point]:
        """Points of a step without pipeline parallelism."""
        layout = self.layout
        accumulates, every = layout.n_microbatches > 1, layout.reduce_every_microbatch
        shards = self.all.sharded * self.numerics.gradient_bytes if accumulates and every else 0.0
        # gradients that accumulate unsharded
        whole = self.all.gathered * self.numerics.reduce_bytes if accumulates and not every else 0.0
        blocks = self.stages[0].blocks
        return [
            *self._points_of_output(shards, whole),
            *self._points_of_block(blocks - 1, "in the backward of the last block", shards, whole),
            *self._points_of_block(0, "in the backward of the first block", shards, whole),
            *self._points_of_embedding(shards, whole),
        ]

    def _points_of_output(self, shards: float, whole: float) -> list[Point]:
        """The loss, and the backward of the output layer."""
        acts, after, loss = self.activations, self.after, self._loss()
        compute, reduce = self.numerics.gathered_bytes, self.numerics.reduce_bytes
        saved = acts.alive(0, self.stages[0].blocks) + acts.rope
        never, tied = not self.layout.reshard_after_forward, self.parts.tied
        kept = self.all.gathered if never else self._root() if tied else after.gathered
        # FSDP2 frees the output of forward's last all-gather at its next all-gather
        sharded = self.layout.shard * self.layout.context > 1 and not tied
        held = after.gathered * compute if sharded else 0.0
        reduced = 0.0 if tied else after.gathered * (compute + reduce) + after.sharded * reduce
        return [
            _point(
                "at the loss",
                gradients=shards,
                unsharded_gradients=whole,
                gathered=kept * compute + held,
                activations=saved + acts.residual,
                logits=loss.saved + loss.forward_temporaries,
            ),
            _point(
                "when backward begins",
                gradients=shards,
                unsharded_gradients=whole,
                gathered=kept * compute,
                activations=saved + acts.residual,
                logits=loss.saved + loss.backward_temporaries,
            ),
            _point(
                "at the reduce-scatter of the output layer",
                gradients=shards,
                unsharded_gradients=whole + reduced,
                gathered=(self.all.gathered if never else self.block.gathered) * compute,
                activations=saved + acts.residual,
            ),
        ]

    def _root(self) -> int:
        """Elements of the root's FSDP group, which has tied weights."""
        return (self.embedding + self.after).gathered if self.parts.tied else 0

    def _points_of_block(self, number: int, at: str, shards: float, whole: float) -> list[Point]:
        """The backward of one block: in its feed-forward layer, and its reduce-scatter."""
        acts, block, after = self.activations, self.block, self.after
        compute, reduce = self.numerics.gathered_bytes, self.numerics.reduce_bytes
        passed = self.stages[0].blocks - 1 - number
        new = (after.sharded + passed * block.sharded) * self.numerics.gradient_bytes
        # the reduce-scatter input of the group before is freed when the next group's begins
        before = (after.gathered if passed == 0 else block.gathered) * reduce
        alive = acts.alive(0, number + 1) + acts.rope
        never = not self.layout.reshard_after_forward
        two = (self.all.gathered if never else self._root() + 2 * block.gathered) * compute
        return [
            _point(
                at,
                gradients=shards or new,
                unsharded_gradients=whole + before + block.gathered * compute / 3,
                gathered=two,
                activations=alive + acts.recomputed(number) + acts.backward_temporaries,
            ),
            _point(
                f"{at}, at its reduce-scatter",
                gradients=shards or new,
                unsharded_gradients=whole
                + block.gathered * (compute + reduce)
                + block.sharded * reduce,
                gathered=two - (0 if never else block.gathered * compute),
                activations=alive - acts.saved(number) + 2 * acts.residual,
            ),
        ]

    def _points_of_embedding(self, shards: float, whole: float) -> list[Point]:
        """The backward of the embedding, and its reduce-scatter."""
        acts, embedding, numerics = self.activations, self.embedding, self.numerics
        compute, reduce = numerics.gathered_bytes, numerics.reduce_bytes
        all_shards = self.all.sharded * numerics.gradient_bytes
        never = not self.layout.reshard_after_forward
        everything = self.all.gathered * compute
        root = self._root() or embedding.gathered
        return [
            _point(
                "in the backward of the embedding",
                gradients=shards or all_shards - embedding.sharded * numerics.gradient_bytes,
                unsharded_gradients=whole
                + self.block.gathered * reduce
                + self._embedding_gradient(compute),
                gathered=everything if never else embedding.gathered * compute,
                activations=acts.residual + acts.rope,
            ),
            _point(
                "at the reduce-scatter of the embedding",
                gradients=shards or all_shards,
                unsharded_gradients=whole
                + root * (compute + reduce)
                + embedding.gathered * (self.layout.tensor - 1) * compute,
                gathered=everything if never else 0.0,
                activations=acts.rope,
            ),
        ]

    def _pipeline_points(self) -> list[Point]:
        """Points of a step with pipeline parallelism; all parameters of the rank are gathered."""
        numerics, acts, layout = self.numerics, self.activations, self.layout
        compute, reduce = numerics.gathered_bytes, numerics.reduce_bytes
        microbatches = layout.n_microbatches // max(1, layout.runs)
        shards = self.all.sharded * numerics.gradient_bytes if layout.runs > 1 else 0.0
        ends = sum((not stage.embedding) + (not stage.output) for stage in self.stages)
        # torch's pipelining has a buffer for each micro-batch, and DTensor computes the embedding's
        # gradient for the whole vocabulary; frameworks that do not shard parameters use neither,
        # and their unsharded gradients are at rest
        of_torch = layout.sharded == "parameters"
        received = ends * (microbatches if of_torch else 1) * acts.residual
        whole = own = blocks = 0.0
        if of_torch:
            own = self.embedding.gathered if self.has_embedding else 0
            whole = own * layout.tensor
            blocks = (self.all.gathered - own) * reduce
        state = _PipelineState(
            in_flight=self._in_flight(),
            one=self._in_flight() / max(1, sum(self.in_flight.values())),
            gradients=blocks + whole * reduce,
            early=blocks + whole * reduce
            if microbatches > max(self.in_flight.values(), default=1)
            else 0.0,
            of_blocks=blocks,
        )
        points = [*self._points_of_stages(state, compute), *self._points_of_loss(state)]
        if microbatches == 1:
            points = [point for point in points if "second" not in point[0]]
        common = {
            "gathered": self.all.gathered * compute,
            "received": received,
            "gradients": shards,
        }
        points = [(at, common | values) for at, values in points]
        return [
            *points,
            _point(
                "when gradients are reduced",
                received=received,
                gradients=self.all.sharded * numerics.gradient_bytes,
                unsharded_gradients=state.gradients + self.block.gathered * reduce,
            ),
        ]

    def _in_flight(self) -> float:
        """What the forwards in flight have saved."""
        acts, total, loss = self.activations, 0.0, self._loss()
        for index, stage in enumerate(self.stages):
            own = acts.alive(stage.first_block, stage.blocks) + acts.rope
            # a stage's output is kept until its backward; the loss is a scalar
            own += loss.saved if stage.output else acts.residual
            total += own * self.in_flight.get(index, 1)
        return total

    def _points_of_stages(self, state: _PipelineState, compute: float) -> list[Point]:
        """Backwards of blocks and of the embedding."""
        acts = self.activations
        numbers = [s.first_block + n for s in self.stages for n in range(s.blocks)]
        recomputed = max((acts.recomputed(number) for number in numbers), default=0.0)
        temporaries = acts.backward_temporaries + self.block.gathered * compute / 3 + recomputed
        rest = state.in_flight - (self._loss().saved if self.has_output else 0.0)
        points = [
            _point(
                "in a backward with all micro-batches in flight",
                unsharded_gradients=state.early,
                activations=rest + temporaries,
            ),
            _point(
                "in the second backward",
                unsharded_gradients=state.gradients,
                activations=max(0.0, rest - state.one) + temporaries,
            ),
        ]
        if not self.has_embedding:
            return points
        gradient = self._embedding_gradient(compute)
        return [
            *points,
            _point(
                "in a backward of the embedding",
                unsharded_gradients=(state.early or state.of_blocks) + gradient,
                activations=max(0.0, state.in_flight - state.one),
            ),
            _point(
                "in the second backward of the embedding",
                unsharded_gradients=state.gradients + gradient,
                activations=max(0.0, state.in_flight - 2 * state.one),
            ),
        ]

    def _points_of_loss(self, state: _PipelineState) -> list[Point]:
        """The loss, if this rank has it."""
        if not self.has_output:
            return []
        loss = self._loss()
        common = {"unsharded_gradients": state.early, "activations": state.in_flight}
        return [
            _point("at the loss", **common, logits=loss.forward_temporaries),
            _point("when backward begins", **common, logits=loss.backward_temporaries),
        ]
