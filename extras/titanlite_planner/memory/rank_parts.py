"""What a pipeline rank has: FSDP groups, stages, bytes at rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from titanlite.optim import assign_owners
from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.memory.block_backward import block_backward, block_forward
from titanlite_planner.memory.loss import LossBytes, loss_bytes
from titanlite_planner.memory.model_parts import (
    EMPTY,
    GroupBytes,
    ModelParts,
    ParameterShape,
    group_bytes,
)
from titanlite_planner.stages import StageParts
from titanlite_planner.workload import Workload


class LayoutParts:
    """What all pipeline ranks of a layout have in common: FSDP groups, and the peaks of a block."""

    def __init__(self, workload: Workload, parts: ModelParts, activations: BlockActivations):
        self.workload, self.parts, self.activations = workload, parts, activations
        self.block, self.dense_block = self.group(parts.block), self.group(parts.dense_block)
        self.embedding = self.group(parts.embedding)
        self.norm, self.output = self.group(parts.norm), self.group(parts.output)
        self.tied = self.group(parts.tied)
        self._forwards: dict[bool, float] = {}
        self._backwards: dict[tuple[bool, bool, bool], tuple[float, float]] = {}

    def group(self, parameters: tuple[ParameterShape, ...]) -> GroupBytes:
        return group_bytes(parameters, self.workload.layout, self.workload.numerics.state_bytes)

    @cached_property
    def feed_forward_elements(self) -> float:
        """Elements of the largest matrices of a block, three or two of them."""
        return self.feed_forward(dense=False)

    def feed_forward(self, dense: bool) -> float:
        """Likewise of a block that is `dense` although others have experts, or of another."""
        experts = tuple(parameter for parameter in self.parts.block if parameter.expert)
        if experts and not dense:
            return self.group(experts).gathered
        model = self.workload.model
        matrices = (3 if model.gated else 2) * model.dim * model.hidden_dim
        return matrices / self.workload.layout.tensor

    def group_of_block(self, number: int) -> GroupBytes:
        """The FSDP groups of block number `number` of the model."""
        return self.dense_block if self.activations.is_dense(number) else self.block

    def block_forward(self, number: int) -> float:
        """Bytes of activations that the forward of a block adds."""
        dense = self.activations.is_dense(number)
        if dense not in self._forwards:
            self._forwards[dense] = block_forward(self.activations.of_block(number))
        return self._forwards[dense]

    def block_backward(self, number: int, summed: bool) -> tuple[float, float]:
        """Bytes of (activations, weight gradients) that the backward of a block adds."""
        acts = self.activations
        dense = acts.is_dense(number)
        kind = dense, acts.recomputes(number), summed
        if kind not in self._backwards:
            compute = self.workload.numerics.gathered_bytes
            group = self.group_of_block(number)
            wide = min(group.gathered, self.feed_forward(dense))
            other = (group.gathered - wide) * compute
            found = block_backward(acts.of_block(number), number, wide * compute, other, summed)
            self._backwards[kind] = found
        return self._backwards[kind]


class RankParts:
    """The modules of one pipeline rank, and the bytes that its points of a step are made of."""

    def __init__(self, common: LayoutParts, stages: list[StageParts]):
        workload = common.workload
        self.workload, self.layout, self.numerics = workload, workload.layout, workload.numerics
        self.common, self.parts, self.activations = common, common.parts, common.activations
        self.stages, self.block, self.embedding = stages, common.block, common.embedding
        self.feed_forward_elements = common.feed_forward_elements
        self.has_embedding = any(stage.embedding for stage in stages)
        self.has_output = any(stage.output for stage in stages)
        tied = self.parts.tied and self.layout.pipeline > 1 and self.has_output
        # of the tied embedding; it is not trained where it is used, so it has no optimizer state
        self.copy = common.tied if tied and self.layout.sharded == "parameters" else EMPTY
        self.after = common.norm + common.output + self.copy
        self.all = self._all()

    def _trained(self) -> Iterator[tuple[tuple[ParameterShape, ...], GroupBytes, int]]:
        """(parameters of a kind of module, their bytes, how many), without tied copies."""
        parts, common = self.parts, self.common
        for stage in self.stages:
            few = self._dense_blocks(stage)
            yield parts.embedding, common.embedding, int(stage.embedding)
            yield parts.dense_block, common.dense_block, few
            yield parts.block, common.block, stage.blocks - few
            yield parts.norm, common.norm, int(stage.norm)
            yield parts.output, common.output, int(stage.output)

    def _all(self) -> GroupBytes:
        total = EMPTY
        for _, group, count in self._trained():
            if count:
                total = total + group.times(count)
        tied = self.parts.tied and self.layout.pipeline > 1
        copies = sum(stage.output and not stage.embedding for stage in self.stages) if tied else 0
        return total + self.common.tied.times(copies)

    def _owned_state(self) -> float:
        """Bytes of the state of the matrices that the first rank owns; see `OwnedMatrices`."""
        if not any(parameter.owner_flops for parameter in self.parts.block):
            return 0.0
        matrices = [
            parameter
            for parameters, _, count in self._trained()
            for parameter in parameters * count
            if parameter.owner_flops
        ]
        tensor = self.layout.tensor
        sharded = any(matrix.tensor_shard(tensor) != matrix.shape for matrix in matrices)
        ranks = self.layout.shard * self.layout.context * (tensor if sharded else 1)
        owners = assign_owners([matrix.owner_flops for matrix in matrices], ranks)
        owned = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == 0]
        return sum(matrix.elements * (matrix.state_bytes or 0.0) for matrix in owned)

    @cached_property
    def resting(self) -> tuple[float, float, float]:
        """Bytes of (parameters, gradients, optimizer state) on the device after backward."""
        numerics, total = self.numerics, self.all
        if self.workload.offload_parameters:
            return 0.0, 0.0, 0.0
        state = total.state - self.copy.state + self._owned_state()
        if self.workload.offload_optimizer:
            state = 0.0
        state += total.stored * numerics.average_bytes
        if self.layout.sharded == "parameters":
            # the copy's gradient is freed, unless FSDP has reduced it together with the norm's
            alone = not self.uses_fsdp or any(
                stage.output and not stage.norm for stage in self.stages
            )
            freed = self.copy.sharded if alone else 0
            grads = (total.sharded - freed) * numerics.gradient_bytes
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

    @cached_property
    def loss(self) -> LossBytes:
        """The loss of a micro-batch, if this rank computes it."""
        if not self.has_output:
            return LossBytes()
        output = self.common.output if self.parts.output else self.common.tied
        return loss_bytes(self.activations, output.gathered)

    @property
    def all_gathers(self) -> bool:
        """Whether FSDP has other ranks to gather parameters from."""
        return self.layout.shard * self.layout.context > 1

    @property
    def uses_fsdp(self) -> bool:
        """Whether weights are sharded, cast or moved; others are used as they are."""
        numerics, of_torch = self.numerics, self.layout.sharded == "parameters"
        one_rank = not self.all_gathers and self.layout.replicate == self.layout.expert_shard == 1
        same = numerics.gathered_bytes == numerics.parameter_bytes and not numerics.float8_gather
        return of_torch and not (one_rank and same and not self.workload.offload_parameters)

    def _dense_blocks(self, stage: StageParts) -> int:
        """Blocks of a stage that have no experts, although others have."""
        return self.activations.count_dense(stage.first_block, stage.blocks)

    def of_blocks(self, stage: StageParts, first: int = 0) -> GroupBytes:
        """The FSDP groups of a stage's blocks, from its block number `first` on."""
        dense = max(0, self._dense_blocks(stage) - first)
        experts = stage.blocks - first - dense
        return self.common.dense_block.times(dense) + self.block.times(experts)

    def largest_matrix(self, number: int) -> float:
        """Elements of the largest weight of block number `number` of the model."""
        matrices = 3 if self.workload.model.gated else 2
        return self.common.feed_forward(self.activations.is_dense(number)) / matrices

    def forward(self, number: int) -> float:
        """Bytes of activations that the forward of a block adds at its peak.

        A block that is recomputed has more in backward, and is not described.
        """
        acts = self.activations
        return 0.0 if acts.recomputes(number) else self.common.block_forward(number)

    def backward(self, number: int, summed: bool = False) -> tuple[float, float]:
        """Bytes of (activations, weight gradients) that the backward of a block adds.

        `summed`: each gradient is added to that of earlier micro-batches, and freed.
        """
        return self.common.block_backward(number, summed)

    def notable_blocks(self, stage: StageParts) -> set[int]:
        """Of a stage's blocks, by their numbers in it, those whose backward can be the peak.

        Memory changes evenly from block to block, so they are those at the ends, of each kind.
        """
        workload = self.workload
        every = workload.recompute_every if workload.recompute == "selective" else 1
        blocks, dense = stage.blocks, self._dense_blocks(stage)
        ends = {*range(every + 1), *range(blocks - every - 1, blocks)}
        ends |= {*range(dense - every, dense + every + 1)} if dense else set()
        return {number for number in ends if 0 <= number < blocks}

    @property
    def embedding_gradient(self) -> float:
        """Bytes of the embedding's gradient, which DTensor computes for the whole vocabulary."""
        if not self.has_embedding:
            return 0.0
        compute = self.numerics.gathered_bytes
        # on a CPU it is summed in fp32 first; see TokenEmbedding
        size = compute + (4 if self.activations.on_cpu and compute < 4 else 0)
        return self.embedding.gathered * self.layout.tensor * size

    @property
    def embedding_shard(self) -> float:
        """Bytes of the embedding's gradient, and of a tensor rank's shard that is copied of it."""
        copies = self.layout.tensor + (1 if self.layout.tensor > 1 else 0)
        return self.embedding.gathered * copies * self.numerics.gathered_bytes

    def reduced(self, group: GroupBytes, last: float, size: float) -> float:
        """Bytes at the reduce-scatter of a group's gradients, of `size` bytes an element.

        Its input and output are in the reduce dtype. The gradients themselves are freed after the
        input is made, but for the last parameter's, of `last` elements. Without other ranks, FSDP2
        copies the input, and in HSDP a quotient of it as well (`foreach_reduce`).
        """
        if not self.uses_fsdp:
            return 0.0
        reduce = self.numerics.reduce_bytes
        after = group.sharded * reduce
        if self.all_gathers:
            after += last * size
        elif self.layout.replicate > 1:
            after *= 2
        return group.gathered * reduce + max(group.gathered * size, after)

    @property
    def largest_shard(self) -> int:
        """Elements of the largest parameter's shard on this rank."""
        parts = [*self.parts.block]
        parts += self.parts.embedding if self.has_embedding else ()
        parts += self.parts.output if self.has_output else ()
        return max(self.common.group((parameter,)).stored for parameter in parts)

    @property
    def largest_group_gradient(self) -> float:
        groups = (self.block, self.embedding, self.after)
        return max(group.sharded for group in groups) * self.numerics.gradient_bytes
