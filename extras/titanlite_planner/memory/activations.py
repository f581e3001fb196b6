"""Bytes of activations: what a block saves for backward, and what its backward adds to that.

The lists follow the operations of a block in eager mode, with FlashAttention
(https://arxiv.org/abs/2205.14135) and fused norms; Korthikanti et al.
(https://arxiv.org/abs/2205.05198, section 4) count the same for a GPT block. A CPU's norms save
more: their input and their normalized input in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from titanlite_planner.memory.expert_activations import ExpertActivations, expert_activations
from titanlite_planner.workload import Recompute, Workload


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one micro-batch's activations on a rank, in one block and around the blocks."""

    workload: Workload
    on_cpu: bool = False

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch inside matmuls."""
        layout = self.workload.layout
        return layout.micro_batch * self.workload.seq_len / layout.context

    @cached_property
    def size(self) -> float:
        return self.workload.numerics.activation_bytes

    @cached_property
    def residual(self) -> float:
        """The residual stream: what is sent between stages and saved of a recomputed block."""
        return self.hidden / (self._tensor if self.workload.layout.sequence_parallel else 1)

    @cached_property
    def hidden(self) -> float:
        """Hidden states of all tokens of a micro-batch."""
        return self.tokens * self.workload.model.dim * self.size

    @cached_property
    def experts(self) -> ExpertActivations | None:
        """The mixture of experts, in place of the feed-forward layer.

        Of frameworks that do not shard parameters, only tensors of the hidden width are known.
        """
        if self.workload.model.experts is None or self.workload.layout.sharded != "parameters":
            return None
        return expert_activations(self.workload, self.tokens)

    @cached_property
    def _dense(self) -> BlockActivations:
        """A block that has a feed-forward layer instead of experts."""
        model = replace(self.workload.model, experts=None)
        return BlockActivations(replace(self.workload, model=model), self.on_cpu)

    @cached_property
    def dense_blocks(self) -> int:
        """Blocks at the start of the model that have no experts, although others have."""
        experts = self.workload.model.experts
        return experts.dense_layers if experts else 0

    def is_dense(self, block: int) -> bool:
        """Whether block number `block` has no experts, although others have."""
        return block < self.dense_blocks

    def count_dense(self, first: int, count: int) -> int:
        """How many of `count` blocks from `first` on are dense in this sense."""
        return min(count, max(0, self.dense_blocks - first))

    def of_block(self, block: int) -> BlockActivations:
        """The activations of block number `block`, with experts or without."""
        return self._dense if self.is_dense(block) else self

    @cached_property
    def _tensor(self) -> int:
        return self.workload.layout.tensor

    @cached_property
    def normed(self) -> float:
        """The input of the matmuls after a norm; tensor ranks gather it.

        DTensor saves what was gathered. Megatron, which does not shard parameters, saves the shard
        and gathers it again in backward (https://arxiv.org/abs/2205.05198, section 4.2.2).
        """
        return self.hidden if self.workload.layout.sharded == "parameters" else self.residual

    @cached_property
    def query(self) -> float:
        model = self.workload.model
        return self.tokens * model.n_heads * model.head_dim / self._tensor * self.size

    @cached_property
    def key(self) -> float:
        model = self.workload.model
        heads = max(1.0, model.n_kv_heads / self._tensor)
        return self.tokens * heads * model.head_dim * self.size

    @cached_property
    def feed_forward(self) -> float:
        """One activation of the width of the feed-forward layer."""
        model = self.workload.model
        if model.experts:
            width = model.experts.active * model.experts.hidden_dim
            width += model.experts.shared_hidden_dim
        else:
            width = model.hidden_dim
        return self.tokens * width / self._tensor * self.size

    @cached_property
    def wide_tensors(self) -> int:
        """Saved tensors of that width: gate, its activation, up and product; or two.

        Fused kernels (compiled, or Transformer Engine's) compute the activation again.
        """
        if not self.workload.model.gated:
            return 2
        return 3 if self.workload.compiled else 4

    @cached_property
    def norm_extra(self) -> float:
        """What a norm saves besides its input and its output."""
        rows = 4 * self.residual / self.size / self.workload.model.dim  # 1 / RMS, fp32
        return rows + self._cpu_norm_extra(self.residual)

    def _cpu_norm_extra(self, normed: float) -> float:
        """What a norm on a CPU saves besides that, of an input of `normed` bytes."""
        if not self.on_cpu:
            return 0.0
        if self.size == 4:
            return normed  # the input, divided by its RMS
        return normed / self.size * (4 + 4 - self.size)  # both in fp32; the input is not saved

    @cached_property
    def attention_core(self) -> float:
        """What the attention kernel saves beside its inputs: its output and log-sum-exp."""
        model = self.workload.model
        heads = model.n_heads / self._tensor
        if self.workload.fused_attention:
            return self.query + 4 * self.tokens * heads
        scores = self.tokens * self.workload.seq_len * heads  # softmax, dropout, and its mask
        return self.query + scores * (2 * self.size + 1)

    @cached_property
    def all_saved(self) -> float:
        """Without recomputation."""
        qk_norm = 0.0
        if self.workload.model.qk_norm:
            heads = self.query + self.key
            qk_norm = heads * (1 + 4 / self.size / self.workload.model.head_dim)
            qk_norm += self._cpu_norm_extra(heads)
        feed_forward = self.normed + self.wide_tensors * self.feed_forward
        if self.experts:
            feed_forward = self.experts.saved
        return (
            self.workload.model.norms_per_block * (self.residual + self.norm_extra)
            + self.normed
            + self.query
            + self._saved_keys_and_values
            + qk_norm
            + self.attention_core
            + feed_forward
        )

    @cached_property
    def pointwise(self) -> float:
        """What pointwise operations compute in a compiled block: they can be recomputed cheaply.

        The inputs of matmuls after a norm, and the activation of the feed-forward layer. Inputs
        that tensor ranks gather are not among them: the compiler recomputes no collective.
        Experts are not compiled.
        """
        normed = 0.0 if self._tensor > 1 else self.normed
        if self.experts:
            return normed if self.experts.gathers else 0.0
        return 2 * normed + self.feed_forward

    @cached_property
    def recomputed_beyond_pointwise(self) -> float:
        """Under a memory budget, the fraction of the activations that needs other operations."""
        if self.workload.recompute != "memory_budget":
            return 0.0
        missing = 1 - self.workload.stored_activations
        return 0.0 if missing * self._budgeted <= self.pointwise else missing

    @cached_property
    def _budgeted(self) -> float:
        """What the compiler saves without a budget, beside the block's input."""
        return self.all_saved - self.residual - (self.experts.saved if self.experts else 0.0)

    @cached_property
    def within_budget(self) -> float:
        """What the compiler saves of a block under a memory budget.

        If pointwise operations suffice, it recomputes all of them, whatever the budget
        (`choose_saved_values_set` in torch/_functorch/partitioners.py, torch 2.13).
        """
        if self.workload.stored_activations == 1:
            return self.all_saved
        beyond = self.recomputed_beyond_pointwise
        return self.all_saved - (beyond * self._budgeted if beyond else self.pointwise)

    @cached_property
    def per_operation(self) -> float:
        """All operations but attention and every second matmul are recomputed."""
        # eager blocks save the output of the last matmul, too, which backward does not need
        outputs = 2 * self.residual if self._tensor > 1 else 0.0
        matmuls = self.query + self.key
        if self.experts:
            matmuls += self.experts.saved_operations
        else:
            matmuls += self.feed_forward
            outputs += 0.0 if self.workload.compiled else self.hidden
        return self.residual + outputs + matmuls + self.attention_core

    def saved(self, block: int) -> float:
        """What block number `block` saves in forward."""
        if self.is_dense(block):
            return self._dense.saved(block)
        recompute = self.workload.recompute
        if recompute == "none" or self._kept(block):
            return self.all_saved
        if recompute == "per_operation":
            return self.per_operation
        if recompute == "memory_budget":
            return self.within_budget
        if recompute == "attention":
            return self.all_saved - (0.0 if self.workload.fused_attention else self._scores)
        return self.residual

    def alive(self, first: int, count: int) -> float:
        """What `count` blocks from `first` on have saved, on the device."""
        if self.workload.offload_activations:  # two blocks are there, others in host memory
            blocks = min(2, count)
            return blocks * max((self.saved(first + n) for n in range(blocks)), default=0.0)
        dense = self.count_dense(first, count)
        if dense:
            rest = self.alive(first + dense, count - dense)
            return self._dense.alive(first, dense) + rest
        every = self.workload.recompute_every if self.workload.recompute == "selective" else 1
        recomputed = -(-(first + count) // every) + -first // every  # blocks 0, every, 2 every, ...
        number = -(-self.dense_blocks // every) * every  # of a block that is recomputed
        return (count - recomputed) * self.saved(number + 1) + recomputed * self.saved(number)

    @cached_property
    def _scores(self) -> float:
        return self.attention_core - self.query

    @cached_property
    def score_gradients(self) -> float:
        """The gradient of the attention matrix, where it is stored."""
        heads = self.workload.model.n_heads / self._tensor
        return self.tokens * self.workload.seq_len * heads * self.size

    @cached_property
    def _repeated(self) -> float:
        """Copies of keys and values for each query head, as a CPU's kernel needs them."""
        return 2 * self.query if self.key < self.query else 0.0

    @cached_property
    def _saved_keys_and_values(self) -> float:
        """What attention saves of them; with sinks on a CPU, those copies (documents.py)."""
        copied = self.on_cpu and self.workload.model.sinks and self._repeated
        return self._repeated if copied else 2 * self.key

    @cached_property
    def ring_forward(self) -> float:
        """What attention over the context ranks has beside its result: see context_attention.py.

        Its output in fp32, the keys and values of all ranks, and the results of two tiles.
        """
        ranks = self.workload.layout.context
        gathered = 2 * self.key * (1 + ranks)
        return (4 / self.size + 1.5) * self.query + gathered + self._repeated

    @cached_property
    def ring_backward(self) -> float:
        """Likewise in backward, with gradients of keys and values in fp32.

        These are the sum, and what one rank sends and receives while the next is computed.
        """
        ranks, wide, pair = self.workload.layout.context, 4 / self.size, 2 * self.key
        gathered = pair * (1 + ranks + wide * (3 if ranks > 2 else 1))
        tile = self._repeated * 2 + pair if self._repeated else pair
        first, second = self.query, self.query / 2 + pair * wide
        if self.on_cpu and self.size < 4:  # a CPU adds a copy of the gradient in fp32
            second += self.key * wide
        return wide * self.query + gathered + pair * wide + tile + max(first, second)

    def _kept(self, block: int) -> bool:
        """Whether "selective" leaves a block without recomputation."""
        return self.workload.recompute == "selective" and not self.recomputes(block)

    def recomputes(self, block: int) -> bool:
        """Whether backward computes block `block` again, in whole or in part."""
        return is_recomputed(self.workload.recompute, self.workload.recompute_every, block)

    def saves_input(self, block: int) -> bool:
        """Whether the input of block `block` itself is saved, not a copy of it in fp32."""
        return self.recomputes(block) or not (self.on_cpu and self.size < 4)

    @cached_property
    def rope(self) -> float:
        """Cosines and sines of all positions, in fp32."""
        layout, width = self.workload.layout, self.workload.model.head_dim
        sequences = layout.micro_batch if layout.pipeline > 1 else 1
        return 2 * 4 * sequences * self.workload.seq_len / layout.context * width


def is_recomputed(recompute: Recompute, every: int, block: int) -> bool:
    """Whether backward computes block number `block` again, in whole or in part.

    `every`: of "selective", which recomputes block 0 and each `every`-th behind it.
    """
    if recompute == "selective":
        return block % every == 0
    return recompute not in ("none", "attention")
