"""Points of a step with pipeline parallelism at which memory can be at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from operator import mul
from typing import NamedTuple

from titanlite_planner.memory.rank import StepPoint
from titanlite_planner.memory.rank_parts import RankParts
from titanlite_planner.memory.schedule_states import ScheduleState
from titanlite_planner.stages import StageParts


def pipeline_points(
    parts: RankParts, states: tuple[ScheduleState, ...], microbatches: int
) -> Iterator[StepPoint]:
    """Every kind of action of a rank's schedule, and the reduction of its gradients.

    `microbatches`: of one run of the schedule.
    """
    rank = _PipelineRank(parts, microbatches)
    # In the last run, all stages have gradients of earlier runs. Assumed states have no reduction.
    if not rank.reduces or all(state.kind != "reduce" for state in states):
        yield from rank.reductions()
    if len(parts.stages) == 1 and parts.all_gathers:
        yield from rank.first_loss()
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
    first: tuple[float, float]  # temporaries and gradients of its weights, unsharded
    summed: tuple[float, float]  # the same, if gradients are added to their sums at once
    later: float  # gradients of the later blocks of the stage, after its first backward


class _Held(NamedTuple):
    """What a rank has at an action beside activations."""

    others: float  # gradients of the rank's other stages: unsharded in the reduce dtype, or reduced
    own: float  # likewise of the stage whose action it is, if it had a backward before
    gathered: float  # parameters; those of reduced stages are freed


class _PipelineRank:
    """The actions of one rank; all of its parameters are gathered."""

    def __init__(self, parts: RankParts, microbatches: int):
        self.parts, self.acts = parts, parts.activations
        self.of_torch = parts.layout.sharded == "parameters"
        self.compute, self.reduce = parts.numerics.gathered_bytes, parts.numerics.reduce_bytes
        copied = self.compute if parts.uses_fsdp else 0
        self.gathered = [self._elements(stage) * copied for stage in parts.stages]
        ends = sum((not stage.embedding) + (not stage.output) for stage in parts.stages)
        # torch's pipelining has a buffer for each micro-batch, others have one
        buffers = ends * (microbatches if self.of_torch else 1)
        self.received = buffers * parts.activations.residual
        self.shards = 0.0  # gradients of earlier runs of the schedule
        reduces_each_run = parts.layout.reduce_every_microbatch and parts.uses_fsdp
        if parts.layout.runs > 1 and reduces_each_run:
            self.shards = parts.all.sharded * parts.numerics.gradient_bytes
        self.saved = [self._saved(stage) for stage in parts.stages]
        self.waiting = [self._output_gradients(stage) for stage in parts.stages]
        self.unsharded = [self._unsharded(stage) for stage in parts.stages]
        # of each stage after its last backward: torch reduces its gradients at once
        self.reduces = parts.layout.runs == 1 or reduces_each_run
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
        if self.of_torch and any(s.number == stage.number - 1 for s in self.parts.stages):
            own -= self.acts.residual  # torch replaces the receive buffer by that stage's output
        return own + (self.parts.loss.saved if stage.output else self.acts.residual)

    def _of_blocks(self, stage: StageParts, count: int) -> float:
        """Of that, what its first `count` blocks have.

        The input of a stage without the embedding is in its receive buffer.
        """
        acts = self.acts
        own = acts.alive(stage.first_block, count) + (acts.rope if stage.blocks else 0.0)
        in_buffer = self.of_torch and not stage.embedding
        if in_buffer and stage.blocks and acts.saves_input(stage.first_block):
            own -= acts.residual
        return own

    def _of_norm(self, stage: StageParts) -> float:
        """Of that, what the last norm has: its input, and more."""
        if not stage.norm:
            return 0.0
        return self.acts.norm_extra + (self.acts.residual if stage.blocks else 0.0)

    def _elements(self, stage: StageParts, embeddings: int = 1) -> float:
        """Gathered parameters of a stage, the embedding's times `embeddings`."""
        parts = self.parts
        elements: float = parts.of_blocks(stage).gathered
        if stage.embedding:
            elements += parts.embedding.gathered * embeddings
        if stage.output:
            elements += parts.after.gathered
        return elements

    def _unsharded(self, stage: StageParts) -> float:
        """Gradients of a stage after its first backward; the embedding's for all ids (DTensor)."""
        embeddings = self.parts.layout.tensor if self.parts.uses_fsdp else 1
        return self._elements(stage, embeddings) * self.reduce * self.of_torch

    def _output_gradients(self, stage: StageParts) -> float:
        """What the input gradients of a stage leave for the weight gradients: the gradients of the
        outputs of all layers with weights."""
        acts = self.acts
        linear = acts.query + 2 * acts.key + 2 * acts.hidden
        linear += (acts.wide_tensors // 2) * acts.feed_forward
        norm = acts.residual * (4 / acts.size if acts.on_cpu else 1.0)  # in fp32 on a CPU
        return stage.blocks * (linear + 2 * norm) + (norm if stage.norm else 0.0)

    def in_flight(self, state: ScheduleState) -> float:
        """What the forwards in flight have saved, and the input gradients of some have left."""
        return sum(map(mul, self.saved, state.in_flight)) + sum(
            map(mul, self.waiting, state.waiting)
        )

    def _point(
        self,
        at: str,
        held: _Held,
        activations: float,
        gradients: float = 0.0,
        logits: float = 0.0,
    ) -> StepPoint:
        """A point of an action; `gradients`: unsharded, beside those that are held."""
        return StepPoint(
            at,
            gradients=self.shards,
            received=self.received,
            gathered=held.gathered,
            unsharded_gradients=held.others + held.own + gradients * self.of_torch,
            activations=activations,
            logits=logits,
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
        freed = [
            gathered if reduced and self.reduces else 0.0
            for gathered, reduced in zip(self.gathered, state.reduced, strict=False)
        ]  # assumed states do not say what has been reduced
        held = _Held(sum(done) - own, own, sum(self.gathered) - sum(freed))
        if state.kind == "forward":
            points = [self._forward_of_blocks(stage, in_flight, held)]
            if stage.output:
                points.append(self._forward_of_loss(stage, in_flight, held))
            return points
        if state.kind == "reduce":
            return self._reductions_of_stage(stage, in_flight, held)
        if state.kind == "input":
            return [self._end_of_input_gradients(state.stage, in_flight, held)]
        if state.kind == "weight":
            return self._weight_gradients(state.stage, in_flight, held)
        others = in_flight - self.saved[state.stage]
        points = self._points_of_blocks(stage, others, held)
        if stage.output:
            points.append(self._backward_of_loss(in_flight, held))
        if stage.embedding:
            points.append(self._backward_of_embedding(stage, others, held))
        return points

    def _forward_of_blocks(self, stage: StageParts, in_flight: float, held: _Held) -> StepPoint:
        if stage.number not in self._forwards:
            self._forwards[stage.number] = self._last_forward(stage)
        before, own = self._forwards[stage.number]
        return self._point("in the forward of a block", held, in_flight + before + own)

    def _last_forward(self, stage: StageParts) -> tuple[float, float]:
        """Bytes of (what is saved before the stage's last block, what its forward adds)."""
        if not stage.blocks:
            return 0.0, 0.0
        before = self._of_blocks(stage, stage.blocks - 1) + self.acts.residual
        return before, self.parts.forward(stage.first_block + stage.blocks - 1)

    def _forward_of_loss(self, stage: StageParts, in_flight: float, held: _Held) -> StepPoint:
        loss = self.parts.loss
        alive = in_flight + self._of_blocks(stage, stage.blocks) + self._of_norm(stage)
        if not stage.blocks:
            alive += self.acts.rope  # computed, and not saved
        return self._point("at the loss", held, alive, logits=loss.saved + loss.forward_temporaries)

    def _end_of_input_gradients(self, number: int, in_flight: float, held: _Held) -> StepPoint:
        """Nothing that forward saved is freed before the weight gradients."""
        acts = self.acts
        norm = 4 * acts.residual * 4 / acts.size if acts.on_cpu else 0.0  # four tensors in fp32
        temporaries = 2 * acts.residual + max(3 * acts.hidden, norm)
        if acts.workload.layout.context > 1:  # when only the attention of one block is left
            left = acts.query + 2 * acts.key + acts.residual
            temporaries = max(temporaries, acts.ring_backward - left)
        alive = in_flight + self.waiting[number] + temporaries
        return self._point("in the backward of a block", held, alive)

    def _weight_gradients(self, number: int, in_flight: float, held: _Held) -> list[StepPoint]:
        """The gradients of a stage in the compute dtype, before they are added to their sums.

        What forward saved and input gradients left is freed block by block. Sums in the same dtype
        get each gradient at once.
        """
        stage = self.parts.stages[number]
        first = self.parts.after.gathered if stage.output else 0.0
        if self.reduce == self.compute and held.own:
            first = max(first, self.parts.largest_matrix(stage.first_block))
            last = 0.0
        else:
            last = self._elements(stage)
        freed = self.saved[number] + self.waiting[number]
        return [
            self._point("in the backward of a block", held, alive, weights * self.compute)
            for weights, alive in ((first, in_flight), (last, in_flight - freed))
        ]

    def _backward_of_loss(self, in_flight: float, held: _Held) -> StepPoint:
        loss = self.parts.loss
        temporaries = loss.backward_temporaries
        if held.own:
            temporaries = max(temporaries, self._added(self.parts.after.gathered) - loss.saved)
        return self._point("when backward begins", held, in_flight, logits=temporaries)

    def _added(self, elements: float) -> float:
        """Bytes of a gradient that FSDP2 adds to its sum in the reduce dtype.

        A CPU adds a copy of it in that dtype.
        """
        casts = self.acts.on_cpu and self.reduce != self.compute
        return elements * (self.compute + (self.reduce if casts else 0.0))

    def _points_of_blocks(self, stage: StageParts, others: float, held: _Held) -> list[StepPoint]:
        if stage.number not in self._backwards:
            self._backwards[stage.number] = self._notable_blocks(stage)
        points = []
        for block in self._backwards[stage.number]:
            temporaries, gradients = block.first
            if not held.own:
                gradients += block.later
            elif self.reduce == self.compute:
                temporaries, gradients = block.summed
            alive = others + block.saved + 2 * self.acts.residual + temporaries
            points.append(self._point("in the backward of a block", held, alive, gradients))
        return points

    def _notable_blocks(self, stage: StageParts) -> list[_BlockBytes]:
        """The blocks of a stage whose backward can be the peak."""
        parts, found = self.parts, []
        of_output = parts.after.gathered * self.reduce if stage.output else 0.0
        for number in parts.notable_blocks(stage):
            saved = self._of_blocks(stage, number + 1)
            later = parts.of_blocks(stage, number + 1).gathered * self.reduce
            first, summed = (
                parts.backward(stage.first_block + number, summed) for summed in (False, True)
            )
            found.append(_BlockBytes(saved, first, summed, later + of_output))
        return found

    def _backward_of_embedding(self, stage: StageParts, others: float, held: _Held) -> StepPoint:
        """Its gradient, and the cast of it to the reduce dtype."""
        parts, later = self.parts, 0.0
        whole = parts.embedding.gathered * parts.layout.tensor
        added = self._added(whole)
        if not held.own:
            later = self._unsharded(stage) - whole * self.reduce
            added = whole * (self.compute + self.reduce) if self.reduce != self.compute else 0.0
        gradients = later + max(parts.embedding_gradient, added)
        alive = others + 2 * self.acts.residual
        return self._point("in the backward of the embedding", held, alive, gradients)

    def first_loss(self) -> list[StepPoint]:
        """The loss of the first micro-batch, whose forward gathers the parameters of the stage.

        FSDP2 frees the output of the last all-gather when that forward ends. The parameters of
        several stages are gathered before their forwards.
        """
        stage = self.parts.stages[0]
        if not stage.output or not self.of_torch:
            return []
        last = self.parts.after.gathered * self.compute
        return [self._forward_of_loss(stage, 0.0, _Held(0.0, 0.0, self.gathered[0] + last))]

    def _reductions_of_stage(
        self, stage: StageParts, in_flight: float, held: _Held
    ) -> list[StepPoint]:
        """The reduction of a stage: the embedding, the blocks, then the norm and the output.

        Each group's parameters and gradients are freed, and its sharded gradient stays. DTensor
        copies the tensor rank's shard of the embedding's gradient first.
        """
        if not self.parts.uses_fsdp:
            return []
        parts, points, sharded = self.parts, [], 0.0
        at = "when gradients are reduced"
        for group, count, last in (
            (parts.embedding, int(stage.embedding), parts.embedding.gathered),
            (parts.block, stage.blocks, parts.largest_matrix(stage.first_block)),
            (parts.after, int(stage.output), parts.after.gathered),
        ):
            if not count:
                continue
            unsharded, freed = group.gathered * self.reduce, group.gathered * self.compute
            if group is parts.embedding and parts.layout.tensor > 1:
                points.append(self._point(at, held, in_flight, unsharded))
                unsharded *= parts.layout.tensor
            added = parts.reduced(group, last, self.reduce) - unsharded
            held = held._replace(gathered=held.gathered - freed)
            point = self._point(at, held, in_flight, added)
            points.append(point._replace(gradients=self.shards + sharded))
            held = _Held(
                held.others, held.own - count * unsharded, held.gathered - (count - 1) * freed
            )
            if not self.shards:
                sharded += count * group.sharded * parts.numerics.gradient_bytes
        return points

    def reductions(self) -> list[StepPoint]:
        """Likewise of the first stage, after a run in which all stages keep their gradients."""
        own = self.unsharded[0]
        held = _Held(sum(self.unsharded) - own, own, sum(self.gathered))
        return self._reductions_of_stage(self.parts.stages[0], 0.0, held)
