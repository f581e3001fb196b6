"""Points of a step without pipeline parallelism at which memory can be at its peak."""

from __future__ import annotations

from titanlite.planning.rank_memory import StepPoint
from titanlite.planning.rank_parts import RankParts


def step_points(parts: RankParts) -> list[StepPoint]:
    """The loss, the backward of the first and the last block and of what is around them."""
    step, blocks = _Step(parts), parts.stages[0].blocks
    return [
        *step.points_of_output(),
        *(point for n in parts.notable_blocks(blocks) for point in step.points_of_block(n)),
        *step.points_of_embedding(),
    ]


class _Step:
    """One forward and backward of FSDP, whose groups are gathered one ahead."""

    def __init__(self, parts: RankParts):
        self.parts, self.acts = parts, parts.activations
        layout, numerics = parts.layout, parts.numerics
        self.compute, self.reduce = numerics.gathered_bytes, numerics.reduce_bytes
        self.blocks = parts.stages[0].blocks
        self.never = not layout.reshard_after_forward
        accumulates, every = layout.n_microbatches > 1, layout.reduce_every_microbatch
        # gradients of earlier micro-batches: reduced, or accumulated unsharded
        self.shards = parts.all.sharded * numerics.gradient_bytes if accumulates and every else 0.0
        self.whole = parts.all.gathered * self.reduce if accumulates and not every else 0.0
        # elements of the group of a block that is reduced last; exchanged experts have their own
        inner = parts.feed_forward_elements if layout.expert > 1 else 0.0
        self.reduced_last = parts.block.gathered - inner
        # elements of the root's FSDP group, which has tied weights
        self.root = (parts.embedding + parts.after).gathered if parts.parts.tied else 0
        # the gradient of tied weights from the loss, until that of the embedding is added to it
        self.of_loss = parts.common.tied.gathered * self.compute if parts.parts.tied else 0.0

    def _gathered(self, *groups: float) -> float:
        """Bytes of gathered groups, given in elements; with "never", of all."""
        elements = self.parts.all.gathered if self.never else self.root + sum(groups)
        return elements * self.compute

    @property
    def _ahead(self) -> float:
        """Elements of the next block, whose all-gather has begun."""
        return self.parts.block.gathered if self.parts.all_gathers else 0

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
                gathered=self._gathered(own, self._ahead),
                activations=saved + acts.norm_extra,
                logits=loss.saved + loss.backward_temporaries,
            ),
            StepPoint(
                "at the reduce-scatter of the output layer",
                **earlier,
                unsharded_gradients=self.whole + reduced,
                gathered=self._gathered(self._ahead),
                activations=saved,
            ),
        ]

    def points_of_block(self, number: int) -> list[StepPoint]:
        """The backward of one block, and its reduce-scatter."""
        parts, acts, block, after = self.parts, self.acts, self.parts.block, self.parts.after
        at = f"in the backward of block {number}"
        passed = self.blocks - 1 - number
        new = (after.sharded + passed * block.sharded) * parts.numerics.gradient_bytes
        # the reduce-scatter input of the group before is freed when the next group's begins
        before = (after.gathered if passed == 0 else self.reduced_last) * self.reduce
        alive = acts.alive(0, number + 1) + acts.rope + acts.residual
        ahead = self._ahead
        if number == 0:  # tied weights are gathered until the end
            ahead = parts.embedding.gathered if self._ahead and not self.root else 0
        temporaries, gradients = parts.backward(number)
        matrices = 3 if parts.workload.model.gated else 2
        return [
            StepPoint(
                at,
                gradients=self.shards or new,
                unsharded_gradients=self.whole + self.of_loss + before + gradients,
                gathered=self._gathered(block.gathered, ahead),
                activations=alive + temporaries,
            ),
            StepPoint(
                f"{at}, at its reduce-scatter",
                gradients=self.shards or new,
                unsharded_gradients=self.whole
                + self.of_loss
                + parts.reduced(block, parts.feed_forward_elements / matrices, self.compute),
                gathered=self._gathered(ahead),
                activations=alive - acts.saved(number),
            ),
        ]

    def points_of_embedding(self) -> list[StepPoint]:
        """The backward of the embedding, and its reduce-scatter."""
        parts, acts, embedding = self.parts, self.acts, self.parts.embedding
        all_shards = parts.all.sharded * parts.numerics.gradient_bytes
        root = embedding + parts.after if self.root else embedding
        of_embedding = embedding.sharded * parts.numerics.gradient_bytes
        # autograd adds gradients in place, but not those of DTensor
        sum_of_shards = self.of_loss if parts.layout.tensor > 1 else 0.0
        return [
            StepPoint(
                "in the backward of the embedding",
                gradients=self.shards or all_shards - of_embedding,
                unsharded_gradients=self.whole
                + self.reduced_last * self.reduce
                + self.of_loss
                + max(parts.embedding_gradient, parts.embedding_shard + sum_of_shards),
                gathered=self._gathered(0 if self.root else embedding.gathered),
                activations=acts.residual + acts.rope,
            ),
            StepPoint(
                "at the reduce-scatter of the embedding",
                gradients=self.shards or all_shards - root.sharded * parts.numerics.gradient_bytes,
                unsharded_gradients=self.whole + parts.reduced(root, root.gathered, self.compute),
                gathered=self._gathered(-self.root),
                activations=acts.rope,
            ),
        ]
