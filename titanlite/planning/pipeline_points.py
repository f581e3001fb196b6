"""Points of a step with pipeline parallelism at which memory can be at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul
from typing import NamedTuple

from titanlite.planning.rank_memory import StepPoint
from titanlite.planning.rank_parts import RankParts
from titanlite.planning.schedule_states import ScheduleState
from titanlite.planning.stages import StageParts


def pipeline_points(
    parts: RankParts, states: tuple[ScheduleState, ...], microbatches: int
) -> Iterator[StepPoint]:
    """Every kind of action of a rank's schedule, and the reduction of its gradients.

    `microbatches`: of one run of the schedule.
    """
    rank = _PipelineRank(parts, microbatches)
    # In the last run, all stages have gradients of earlier runs. Assumed states have no reduction.
    if not rank.reduces or all(state.kind != "reduce" for state in states):
        yield rank.reduction()
    largest: dict[ScheduleState, float] = {}  # all else being equal, the most in flight is the peak
    for state in states:
        in_flight = rank.in_flight(state)
        like = state._replace(in_flight=(), waiting=())
        largest[like] = max(in_flight, largest.get(like, 0.0))
    for state, in_flight in largest.items():
        yield from rank.points_of(state, in_flight)


class _BlockBytes(NamedTuple):
    """A block of a stage in backward, whatever the action."""

    saved: float  # by the forward of the stage, up to this block
    temporaries: float
    gradients: float  # of its weights, unsharded
    later: float  # gradients of the later blocks of the stage, after its first backward


class _Accumulated(NamedTuple):
    """Gradients of earlier micro-batches, in the reduce dtype and unsharded."""

    others: float  # of the rank's other stages
    own: float  # of the stage whose action it is, if it had a backward before


class _PipelineRank:
    """The actions of one rank; all of its parameters are gathered."""

    def __init__(self, parts: RankParts, microbatches: int):
        self.parts, self.acts = parts, parts.activations
        self.of_torch = parts.layout.sharded == "parameters"
        self.compute, self.reduce = parts.numerics.gathered_bytes, parts.numerics.reduce_bytes
        self.gathered = parts.all.gathered * self.compute
        ends = sum((not stage.embedding) + (not stage.output) for stage in parts.stages)
        # torch's pipelining has a buffer for each micro-batch, others have one
        buffers = ends * (microbatches if self.of_torch else 1)
        self.received = buffers * parts.activations.residual
        self.shards = 0.0  # gradients of earlier runs of the schedule
        if parts.layout.runs > 1 and parts.layout.reduce_every_microbatch:
            self.shards = parts.all.sharded * parts.numerics.gradient_bytes
        self.saved = [self._saved(stage) for stage in parts.stages]
        self.waiting = [self._output_gradients(stage) for stage in parts.stages]
        self.unsharded = [self._unsharded(stage) for stage in parts.stages]
        # of each stage after its last backward: torch reduces its gradients at once
        self.reduces = parts.layout.runs == 1 or parts.layout.reduce_every_microbatch
        share = 0.0
        if sum(self.unsharded):
            share = parts.all.sharded * parts.numerics.gradient_bytes / sum(self.unsharded)
        new = 0.0 if self.shards else share  # gradients of earlier runs have their memory
        self.reduced = [unsharded * (new if self.reduces else 1.0) for unsharded in self.unsharded]
        self._forwards: dict[int, tuple[float, float]] = {}
        self._backwards: dict[int, list[_BlockBytes]] = {}  # by stage

    def _saved(self, stage: StageParts) -> float:
        """What a forward of a stage has saved.

        A stage's output is kept until its backward; the loss is a scalar.
        """
        own = self._of_blocks(stage, stage.blocks) + self._of_norm(stage)
        return own + (self.parts.loss.saved if stage.output else self.acts.residual)

    def _of_blocks(self, stage: StageParts, count: int) -> float:
        """Of that, what its first `count` blocks have.

        The input of a stage without the embedding is in its receive buffer.
        """
        acts = self.acts
        own = acts.alive(stage.first_block, count) + acts.rope
        in_buffer = self.of_torch and not stage.embedding
        if in_buffer and stage.blocks and acts.saves_input(stage.first_block):
            own -= acts.residual
        return own

    def _of_norm(self, stage: StageParts) -> float:
        """Of that, what the last norm has: its input, and more."""
        if not stage.norm:
            return 0.0
        return self.acts.norm_extra + (self.acts.residual if stage.blocks else 0.0)

    def _unsharded(self, stage: StageParts) -> float:
        """Gradients of a stage after its first backward; the embedding's for all ids (DTensor)."""
        if not self.of_torch:
            return 0.0
        parts = self.parts
        elements: float = stage.blocks * parts.block.gathered
        if stage.embedding:
            elements += parts.embedding.gathered * parts.layout.tensor
        if stage.output:
            elements += parts.after.gathered
        return elements * self.reduce

    def _output_gradients(self, stage: StageParts) -> float:
        """What the input gradients of a stage leave for the weight gradients: the gradients of the
        outputs of all layers with weights."""
        acts = self.acts
        linear = acts.query + 2 * acts.key + 2 * acts.hidden
        linear += (acts.wide_tensors // 2) * acts.feed_forward
        norms = 2 * acts.residual
        return stage.blocks * (linear + norms) + (acts.residual if stage.norm else 0.0)

    def in_flight(self, state: ScheduleState) -> float:
        """What the forwards in flight have saved, and the input gradients of some have left."""
        return sum(map(mul, self.saved, state.in_flight)) + sum(
            map(mul, self.waiting, state.waiting)
        )

    def points_of(self, state: ScheduleState, in_flight: float) -> list[StepPoint]:
        """The points of one action."""
        stages = self.parts.stages
        stage = stages[state.stage]
        done = [
            unsharded if first else 0.0
            for unsharded, first in zip(self.unsharded, state.accumulated, strict=True)
        ]
        for number, reduced in enumerate(state.reduced):
            done[number] += self.reduced[number] if reduced else 0.0
        own = done[state.stage]
        accumulated = _Accumulated(sum(done) - own, own)
        if state.kind == "forward":
            points = [self._forward_of_blocks(stage, in_flight, accumulated)]
            if stage.output:
                points.append(self._forward_of_loss(stage, in_flight, accumulated))
            return points
        if state.kind == "reduce":
            return [self._reduction_of_stage(stage, in_flight, accumulated)]
        if state.kind == "input":
            return [self._end_of_input_gradients(state.stage, in_flight, accumulated)]
        if state.kind == "weight":
            return [self._end_of_weight_gradients(state.stage, in_flight, accumulated)]
        others = in_flight - self.saved[state.stage]
        points = self._points_of_blocks(stage, others, accumulated)
        if stage.output:
            points.append(self._backward_of_loss(in_flight, accumulated))
        if stage.embedding:
            points.append(self._backward_of_embedding(stage, others, accumulated))
        return points

    def _forward_of_blocks(
        self, stage: StageParts, in_flight: float, accumulated: _Accumulated
    ) -> StepPoint:
        if stage.number not in self._forwards:
            self._forwards[stage.number] = self._last_forward(stage)
        before, own = self._forwards[stage.number]
        return StepPoint(
            "in the forward of a block",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + accumulated.own,
            activations=in_flight + before + own,
        )

    def _last_forward(self, stage: StageParts) -> tuple[float, float]:
        """Bytes of (what is saved before the stage's last block, what its forward adds)."""
        if not stage.blocks:
            return 0.0, 0.0
        before = self._of_blocks(stage, stage.blocks - 1) + self.acts.residual
        return before, self.parts.forward(stage.first_block + stage.blocks - 1)

    def _forward_of_loss(
        self, stage: StageParts, in_flight: float, accumulated: _Accumulated
    ) -> StepPoint:
        loss = self.parts.loss
        return StepPoint(
            "at the loss",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + accumulated.own,
            activations=in_flight + self._of_blocks(stage, stage.blocks) + self._of_norm(stage),
            logits=loss.saved + loss.forward_temporaries,
        )

    def _end_of_input_gradients(
        self, stage: int, in_flight: float, accumulated: _Accumulated
    ) -> StepPoint:
        """Nothing that forward saved is freed before the weight gradients."""
        return StepPoint(
            "in the backward of a block",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + accumulated.own,
            activations=in_flight
            + self.waiting[stage]
            + 2 * self.acts.residual
            + 3 * self.acts.hidden,
        )

    def _end_of_weight_gradients(
        self, stage: int, in_flight: float, accumulated: _Accumulated
    ) -> StepPoint:
        """The gradients of a stage in the compute dtype, before they are added to their sums."""
        parts = self.parts.stages[stage]
        weights: float = parts.blocks * self.parts.block.gathered
        if parts.output:
            weights += self.parts.after.gathered
        return StepPoint(
            "in the backward of a block",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + accumulated.own + weights * self.compute,
            activations=in_flight,
        )

    def _backward_of_loss(self, in_flight: float, accumulated: _Accumulated) -> StepPoint:
        return StepPoint(
            "when backward begins",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + accumulated.own,
            activations=in_flight,
            logits=self.parts.loss.backward_temporaries,
        )

    def _points_of_blocks(
        self, stage: StageParts, others: float, accumulated: _Accumulated
    ) -> list[StepPoint]:
        if stage.number not in self._backwards:
            self._backwards[stage.number] = self._notable_blocks(stage)
        parts, points = self.parts, []
        for saved, temporaries, gradients, after in self._backwards[stage.number]:
            later = 0.0  # gradients of this micro-batch that were accumulated
            if not accumulated.own and self.of_torch:
                later = after
            elif self.reduce == self.compute:  # each gradient is added to its sum at once
                matrices = 3 if parts.workload.model.gated else 2
                gradients = parts.feed_forward_elements / matrices * self.compute
            points.append(
                StepPoint(
                    "in the backward of a block",
                    gradients=self.shards,
                    received=self.received,
                    gathered=self.gathered,
                    unsharded_gradients=accumulated.others
                    + accumulated.own
                    + later
                    + (gradients if self.of_torch else 0.0),
                    activations=others + saved + 2 * self.acts.residual + temporaries,
                )
            )
        return points

    def _notable_blocks(self, stage: StageParts) -> list[_BlockBytes]:
        """The blocks of a stage whose backward can be the peak."""
        parts, found = self.parts, []
        of_output = parts.after.gathered * self.reduce if stage.output else 0.0
        for number in parts.notable_blocks(stage.blocks):
            saved = self._of_blocks(stage, number + 1)
            later = (stage.blocks - 1 - number) * parts.block.gathered * self.reduce
            block = parts.backward(stage.first_block + number)
            found.append(_BlockBytes(saved, *block, later + of_output))
        return found

    def _backward_of_embedding(
        self, stage: StageParts, others: float, accumulated: _Accumulated
    ) -> StepPoint:
        """Its gradient, and the cast of the first one to the reduce dtype."""
        parts = self.parts
        before, gradient = accumulated.own, parts.embedding_gradient
        if self.of_torch and not before:
            whole = parts.embedding.gathered * parts.layout.tensor
            before = self._unsharded(stage) - whole * self.reduce
            cast = whole * (self.compute + self.reduce)
            gradient = max(gradient, cast if self.reduce != self.compute else 0.0)
        return StepPoint(
            "in the backward of the embedding",
            gradients=self.shards,
            received=self.received,
            gathered=self.gathered,
            unsharded_gradients=accumulated.others + before + (gradient if self.of_torch else 0.0),
            activations=others + 2 * self.acts.residual,
        )

    def _reduction_of_stage(
        self, stage: StageParts, in_flight: float, accumulated: _Accumulated
    ) -> StepPoint:
        """The reduction of one stage, while others of the rank may have work left."""
        return self._reduction(stage.embedding, in_flight, accumulated.others + accumulated.own)

    def reduction(self) -> StepPoint:
        """The reduction after a run in which all stages keep their gradients."""
        return self._reduction(self.parts.has_embedding, 0.0, sum(self.unsharded))

    def _reduction(self, has_embedding: bool, in_flight: float, unsharded: float) -> StepPoint:
        """The reduce-scatter of the first group, when all others have unsharded gradients."""
        parts, shards = self.parts, self.shards
        group = parts.embedding if has_embedding else parts.block
        if self.of_torch:
            unsharded += group.gathered * self.reduce
            shards = shards or group.sharded * parts.numerics.gradient_bytes
        return StepPoint(
            "when gradients are reduced",
            gradients=shards,
            received=self.received,
            unsharded_gradients=unsharded,
            gathered=self.gathered - group.gathered * self.compute,
            activations=in_flight,
        )
