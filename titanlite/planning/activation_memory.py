"""Bytes of activations: what a block saves for backward, and what its backward adds to that.

The lists follow the operations of a block in eager mode, with FlashAttention
(https://arxiv.org/abs/2205.14135) and fused norms; Korthikanti et al.
(https://arxiv.org/abs/2205.05198, section 4) count the same for a GPT block. A CPU's norms save
more: their input and their normalized input in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from titanlite.planning.workload import Workload


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
    def _tensor(self) -> int:
        return self.workload.layout.tensor

    @cached_property
    def _normed(self) -> float:
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
    def _feed_forward_tensors(self) -> int:
        """Saved tensors of that width: gate, its activation, up and product; or two."""
        return 4 if self.workload.model.gated else 2

    @cached_property
    def _norm_extra(self) -> float:
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
        return (
            2 * (self.residual + self._normed + self._norm_extra)
            + self.query
            + 2 * self.key
            + qk_norm
            + self.attention_core
            + self._feed_forward_tensors * self.feed_forward
        )

    @cached_property
    def per_operation(self) -> float:
        """All operations but attention and every second matmul are recomputed."""
        outputs = self.hidden + (2 * self.residual if self._tensor > 1 else 0.0)
        matmuls = self.query + self.key + self.feed_forward
        return self.residual + outputs + matmuls + self.attention_core

    def saved(self, block: int) -> float:
        """What block number `block` saves in forward."""
        recompute = self.workload.recompute
        if recompute == "none" or self._kept(block):
            return self.all_saved
        if recompute == "per_operation":
            return self.per_operation
        if recompute == "memory_budget":
            stored = self.workload.stored_activations
            return self.residual + stored * (self.all_saved - self.residual)
        if recompute == "attention":
            return self.all_saved - (0.0 if self.workload.fused_attention else self._scores)
        return self.residual

    def alive(self, first: int, count: int) -> float:
        """What `count` blocks from `first` on have saved, on the device."""
        if self.workload.offload_activations:  # two blocks are there, others in host memory
            return 2 * max((self.saved(first + n) for n in range(min(2, count))), default=0.0)
        every = self.workload.recompute_every if self.workload.recompute == "selective" else 1
        kept = sum((first + n) % every != 0 for n in range(count)) if every > 1 else 0
        return kept * self.saved(1) + (count - kept) * self.saved(0)

    @cached_property
    def _scores(self) -> float:
        return self.attention_core - self.query

    def _kept(self, block: int) -> bool:
        """Whether "selective" leaves a block without recomputation."""
        every = self.workload.recompute_every
        return self.workload.recompute == "selective" and block % every != 0

    def recomputed(self, block: int) -> float:
        """What exists of block `block` in its backward and was not saved."""
        return max(0.0, self.all_saved - self.saved(block))

    @cached_property
    def backward_temporaries(self) -> float:
        """The most that the backward of a block has beside what it saved.

        Before the gate: gradients of the residual stream, of the product and of its two factors.
        """
        gathered = self.hidden if self._tensor > 1 else 0.0
        return self.residual + max(2 * gathered + self.feed_forward, 2 * self.feed_forward)

    @cached_property
    def rope(self) -> float:
        """Cosines and sines of all positions, in fp32."""
        layout, width = self.workload.layout, self.workload.model.head_dim
        sequences = layout.micro_batch if layout.pipeline > 1 else 1
        return 2 * 4 * sequences * self.workload.seq_len / layout.context * width / 2


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the output layer and the loss of one micro-batch."""

    saved: float  # between forward and backward
    forward_temporaries: float
    backward_temporaries: float


def loss_bytes(activations: BlockActivations, weight_elements: int, chunked: bool) -> LossBytes:
    """The loss of titanlite (`chunked`): gradients are computed in forward, chunk by chunk.

    Otherwise the logits are saved in the compute dtype, and their softmax in fp32.
    """
    workload, size = activations.workload, activations.size
    vocabulary = workload.model.vocab_size / workload.layout.tensor
    tokens = activations.tokens
    chunk = min(tokens, workload.loss_chunk_tokens or tokens)
    if not chunked:
        logits = tokens * vocabulary
        return LossBytes(logits * (size + 4), logits * 4, logits * size)
    cast = size if size < 4 else 0
    sum_size = 4 if chunk < tokens else size
    weights = weight_elements * sum_size
    logits = chunk * vocabulary * (4 + cast)
    first = logits + (weights if chunk < tokens else 0)
    gradient = chunk * vocabulary * size + weight_elements * size
    second = gradient + (weights if chunk < tokens else 0)
    saved = activations.hidden + weights
    return LossBytes(
        saved,
        max(first, second) - weights,
        activations.hidden + weight_elements * size,
    )
