"""Points of a step without pipeline parallelism at which memory can be at its peak."""

from __future__ import annotations

from titanlite_planner.memory.rank import StepPoint
from titanlite_planner.memory.rank_parts import RankParts


def step_points(parts: RankParts) -> list[StepPoint]:
    """The loss, the backward of the first and the last block and of what is around them."""
    step, blocks = _Step(parts), parts.notable_blocks(parts.stages[0])
    return [
        *step.points_of_output(),
        *(point for number in blocks for point in step.points_of_block(number)),
        *step.points_of_embedding(),
    ]


class _Step:
    """One forward and backward of FSDP, whose groups are gathered one ahead."""

    def __init__(self, parts: RankParts):
        self.parts, self.acts = parts, parts.activations
        layout, numerics = parts.layout, parts.numerics
        self.compute, self.reduce = numerics.gathered_bytes, numerics.reduce_bytes
        self.input = self.reduce if parts.uses_fsdp else 0  # bytes of an element to be reduced
        self.blocks = parts.stages[0].blocks
        self.never = not layout.reshard_after_forward
        accumulates, every = layout.n_microbatches > 1, layout.reduce_every_microbatch
        # gradients of earlier micro-batches: reduced, or accumulated unsharded
        self.shards = parts.all.sharded * numerics.gradient_bytes if accumulates and every else 0.0
        self.whole = parts.all.gathered * self.reduce if accumulates and not every else 0.0
        # elements of the root's FSDP group, which has tied weights
        self.root = (parts.embedding + parts.after).gathered if parts.parts.tied else 0
        # the gradient of tied weights from the loss, until that of the embedding is added to it
        self.of_loss = parts.common.tied.gathered * self.compute if parts.parts.tied else 0.0

    def _gathered(self, *groups: float, freed: float = 0.0) -> float:
        """Bytes of gathered groups, given in elements; with "never", of all that are not freed.

        One rank frees none, and has none of weights that it need not cast.
        """
        if not self.parts.uses_fsdp:
            return 0.0
        if self.never and not self.parts.all_gathers and self.parts.layout.replicate == 1:
            freed = 0.0
        elements = self.parts.all.gathered - freed if self.never else self.root + sum(groups)
        return elements * self.compute

    def _accumulated(self, reduced: float) -> float:
        """Bytes of unsharded gradients of earlier micro-batches, after `reduced` elements."""
        return max(0.0, self.whole - reduced * self.reduce)

    def _reduced_last(self, number: int) -> float:
        """Elements of the group of a block that is reduced last; exchanged experts have their
        own."""
        parts = self.parts
        experts = parts.layout.expert > 1 and not self.acts.is_dense(number)
        inner = parts.feed_forward_elements if experts else 0.0
        return parts.common.group_of_block(number).gathered - inner

    def _ahead(self, number: int) -> float:
        """Elements of a block whose all-gather has begun."""
        return self.parts.common.group_of_block(number).gathered if self.parts.all_gathers else 0

    def points_of_output(self) -> list[StepPoint]:
        """The loss, and the backward of the output layer."""
        parts, acts, after, loss = self.parts, self.acts, self.parts.after, self.parts.loss
        tied, blocks = parts.parts.tied, self.blocks
        saved = acts.alive(0, blocks) + acts.rope + acts.residual
        own = 0 if tied else after.gathered
        # FSDP2 frees the output of forward's last all-gather at its next all-gather
        held = own * self.compute if parts.all_gathers else 0.0
        reduced = 0.0 if tied else parts.reduced(after, after.gathered, self.compute)
        earlier = {"gradients": self.shards}
        before = acts.alive(0, blocks - 1) + acts.rope + acts.residual
        return [
            StepPoint(
                "in the forward of the last block",
                **earlier,
                unsharded_gradients=self.whole,
                gathered=self._gathered(parts.block.gathered, own if parts.all_gathers else 0),
                activations=before + parts.forward(blocks - 1),
            ),
            StepPoint(
                "at the loss",
                **earlier,
                unsharded_gradients=self.whole,
                gathered=self._gathered(own) + held,
                activations=saved + acts.norm_extra,
                logits=loss.saved + loss.forward_temporaries,
            ),
            StepPoint(
                "when backward begins",
                **earlier,
                unsharded_gradients=self.whole,
                gathered=self._gathered(own, self._ahead(blocks - 1)),
                activations=saved + acts.norm_extra,
                logits=loss.saved + loss.backward_temporaries,
            ),
            StepPoint(
                "at the reduce-scatter of the output layer",
                **earlier,
                unsharded_gradients=self.whole + reduced,
                gathered=self._gathered(self._ahead(blocks - 1), freed=own),
                activations=saved,
            ),
        ]

    def points_of_block(self, number: int) -> list[StepPoint]:
        """The backward of one block, and its reduce-scatter."""
        parts, acts, block = self.parts, self.acts, self.parts.common.group_of_block(number)
        at = f"in the backward of block {number}"
        # the groups whose gradients are reduced already; tied weights are reduced at the end
        passed = parts.of_blocks(parts.stages[0], number + 1)
        passed = passed if self.root else passed + parts.after
        new = passed.sharded * parts.numerics.gradient_bytes
        # the reduce-scatter input of the group before is freed when the next group's begins
        last = number == self.blocks - 1
        before = parts.after.gathered if last else self._reduced_last(number + 1)
        alive = acts.alive(0, number + 1) + acts.rope + acts.residual
        if number:
            ahead = self._ahead(number - 1)
        else:  # tied weights are gathered until the end
            ahead = parts.embedding.gathered if parts.all_gathers and not self.root else 0
        temporaries, gradients = parts.backward(number)
        accumulated = self._accumulated(passed.gathered) + self.of_loss
        reduced = parts.reduced(block, parts.largest_matrix(number), self.compute)
        return [
            StepPoint(
                at,
                gradients=self.shards or new,
                unsharded_gradients=accumulated + before * self.input + gradients,
                gathered=self._gathered(block.gathered, ahead, freed=passed.gathered),
                activations=alive + temporaries,
            ),
            StepPoint(
                f"{at}, at its reduce-scatter",
                gradients=self.shards or new,
                unsharded_gradients=accumulated + reduced,
                gathered=self._gathered(ahead, freed=passed.gathered + block.gathered),
                activations=alive - acts.saved(number),
            ),
        ]

    def points_of_embedding(self) -> list[StepPoint]:
        """The backward of the embedding, and its reduce-scatter."""
        parts, acts, embedding = self.parts, self.acts, self.parts.embedding
        root = embedding + parts.after if self.root else embedding
        own = root.sharded * parts.numerics.gradient_bytes
        others = parts.all.sharded * parts.numerics.gradient_bytes - own
        passed = parts.all.gathered - root.gathered
        # autograd adds gradients in place, but not those of DTensor
        sum_of_shards = self.of_loss if parts.layout.tensor > 1 else 0.0
        # of the root, the gradient of the tied weights is freed before the output is made
        reduced = parts.reduced(root, 0 if self.root else root.gathered, self.compute)
        return [
            StepPoint(
                "in the backward of the embedding",
                gradients=self.shards or others,
                unsharded_gradients=self._accumulated(passed)
                + self._reduced_last(0) * self.input
                + self.of_loss
                + max(parts.embedding_gradient, parts.embedding_shard + sum_of_shards),
                gathered=self._gathered(0 if self.root else embedding.gathered, freed=passed),
                activations=acts.residual + acts.rope,
            ),
            StepPoint(
                "at the reduce-scatter of the embedding",
                gradients=self.shards or others,
                unsharded_gradients=self._accumulated(passed) + reduced,
                gathered=self._gathered(-self.root, freed=parts.all.gathered),
                activations=acts.rope,
            ),
        ]
