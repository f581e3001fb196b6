"""Seconds of one micro-batch in a block, in the embedding and in the output layer, on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from titanlite.models import ModelShape
from titanlite.planning.collective_time import CollectiveTimes
from titanlite.planning.kernel_time import BACKWARD_ATTENTION, KERNEL_S, KernelTimes
from titanlite.planning.workload import (
    Layout,
    MatmulPrecision,
    Numerics,
    Recompute,
    Workload,
)

KERNELS = {True: 12, False: 40}  # of a block forward, compiled or eager; backward has twice as many
TENSOR_HIDDEN = 0.5
# of the communication of tensor parallelism, where matmuls run in chunks: torchtitan's tables of
# June 2025 gain 4 to 14 % of a step, whose communication is estimated at 19 to 27 % of it
HOST_S = 30e-6  # of an eager operation, with the wait for it, where launches block


class Seconds(NamedTuple):
    """Seconds by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # memory-bound operations
    tensor: float = 0.0  # exposed communication
    context: float = 0.0
    expert: float = 0.0
    shard: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def compute(self) -> float:
        """Seconds in which communication of other dimensions may run."""
        return self.matmul + self.attention + self.memory

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """The sum with `other`, `times` times."""
        return Seconds(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class Passes(NamedTuple):
    """A forward pass, and a backward pass with its recomputation."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        """The sum with `other`, `times` times."""
        return Passes(
            self.forward.plus(other.forward, times), self.backward.plus(other.backward, times)
        )


@dataclass(frozen=True)
class BlockCase:
    """What the time of a block depends on; equal cases are computed once."""

    model: ModelShape
    layout: tuple[int, int, int, int]  # ranks: tensor, context, expert; 1 if sequence parallel
    micro_batch: int
    accumulates: bool  # unsharded gradients of several micro-batches
    seq_len: int
    numerics: Numerics
    recompute: Recompute
    recompute_every: int
    stored_activations: float
    compiled: bool
    fused_attention: bool
    attention_kernel: str
    overlap_tensor: bool
    blocking_launches: bool
    kernels: KernelTimes
    collectives: CollectiveTimes

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one context rank."""
        return self.micro_batch * self.seq_len / self.layout[1]

    @property
    def unquantized(self) -> MatmulPrecision:
        """The precision of attention and of the output layer."""
        return "float32" if self.numerics.matmuls == "float32" else "bfloat16"


def block_case(workload: Workload, kernels: KernelTimes, collectives: CollectiveTimes) -> BlockCase:
    """The case of a workload."""
    layout: Layout = workload.layout
    sequence_parallel = layout.sequence_parallel and layout.tensor > 1
    return BlockCase(
        workload.model,
        (layout.tensor, layout.context, layout.expert, int(sequence_parallel)),
        layout.micro_batch,
        layout.n_microbatches > 1
        and not (layout.sharded == "parameters" and layout.reduce_every_microbatch),
        workload.seq_len,
        workload.numerics,
        workload.recompute,
        workload.recompute_every,
        workload.stored_activations,
        workload.compiled,
        workload.fused_attention,
        workload.attention_kernel,
        workload.overlap.tensor,
        workload.blocking_launches,
        kernels,
        collectives,
    )


@lru_cache(maxsize=65536)
def block_passes(case: BlockCase, dense: bool = True) -> Passes:
    """One block; a dense one, or one with experts."""
    attention, projections = _attention(case), _projections(case)
    feed_forward = _dense_feed_forward(case) if dense else _experts(case)
    passes = projections.plus(attention).plus(feed_forward).plus(_elementwise(case))
    passes = passes.plus(_tensor_communication(case))
    return Passes(passes.forward, passes.backward.plus(_recomputed(case, passes, attention)))


def _recomputed(case: BlockCase, passes: Passes, attention: Passes) -> Seconds:
    """What backward computes again."""
    if case.recompute == "full":
        return passes.forward
    if case.recompute == "selective":
        return Seconds().plus(passes.forward, 1 / max(1, case.recompute_every))
    if case.recompute == "attention":
        return attention.forward
    if case.recompute == "memory_budget":
        return Seconds().plus(passes.forward, 1 - case.stored_activations)
    if case.recompute == "per_operation":  # every second matmul, and what is memory-bound
        forward = passes.forward
        return Seconds(matmul=forward.matmul / 2, memory=forward.memory, tensor=forward.tensor / 2)
    return Seconds()


def _matmul(case: BlockCase, m: float, k: float, n: float, count: float = 1.0) -> Passes:
    """A linear layer [k, n] on m tokens: forward, and the gradients of its input and weight."""
    kernels, precision = case.kernels, case.numerics.matmuls
    forward = kernels.matmul(m, k, n, precision) * count
    backward = (kernels.matmul(m, n, k, precision) + kernels.matmul(k, m, n, precision)) * count
    quantized = _quantization(case, m, k, n, count)
    stored = 2 * k * n * case.numerics.gradient_bytes * count if case.accumulates else 0.0
    return Passes(
        Seconds(matmul=forward, memory=quantized[0]),
        Seconds(matmul=backward, memory=quantized[1] + kernels.memory_bound(stored)),
    )


def _quantization(
    case: BlockCase, m: float, k: float, n: float, count: float
) -> tuple[float, float]:
    """Seconds to quantize the operands of a linear layer, forward and backward.

    An operand is read for its largest value, unless that is fused into what wrote it, read again,
    and written in the two layouts that the matmuls need.
    """
    if case.numerics.matmuls not in ("float8", "float4"):
        return 0.0, 0.0
    each = 4.0 if case.compiled else 6.0  # bytes
    if case.numerics.float8_rowwise:
        each = 10.0
    forward = case.kernels.memory_bound(each * (m * k + k * n) * count)
    return forward, case.kernels.memory_bound(each * m * n * count)


def _projections(case: BlockCase) -> Passes:
    """Queries, keys and values in one matmul, and the output projection."""
    model, tensor = case.model, case.layout[0]
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    qkv = (queries + 2 * keys) / tensor
    first = _matmul(case, case.tokens, model.dim, qkv)
    return first.plus(_matmul(case, case.tokens, queries / tensor, model.dim))


def _attention(case: BlockCase) -> Passes:
    """The core attention, with the exchange of keys and values over the context ranks."""
    model, (tensor, context, _, _) = case.model, case.layout
    kernels, batch = case.kernels, case.micro_batch
    heads = model.n_heads / tensor
    if case.fused_attention:
        width = heads * model.head_dim
        flops = kernels.flash_flops(batch, case.seq_len, width, model.head_dim) / context
        seconds = flops / kernels.attention_rate(case.attention_kernel, case.unquantized)
        passes = Passes(Seconds(attention=seconds), Seconds(attention=seconds * BACKWARD_ATTENTION))
    else:
        seconds, forward, backward = kernels.stored_attention(
            batch, case.seq_len, heads, model.head_dim
        )
        passes = Passes(
            Seconds(attention=seconds, memory=forward),
            Seconds(attention=2 * seconds, memory=backward),
        )
    if context == 1:
        return passes
    kv = 2 * model.n_kv_heads * model.head_dim / tensor * case.numerics.activation_bytes
    exchanged = case.collectives.all_gather(kv * case.tokens * context, context, tensor)
    hidden = passes.forward.attention, passes.backward.attention
    first = exchanged / context  # the exchange overlaps with the attention of the part before
    exposed = [max(first, exchanged - hidden[0]), max(2 * first, 2 * exchanged - hidden[1])]
    return Passes(
        passes.forward.plus(Seconds(context=exposed[0])),
        passes.backward.plus(Seconds(context=exposed[1])),
    )


def _dense_feed_forward(case: BlockCase) -> Passes:
    model, tensor = case.model, case.layout[0]
    return _gated_layer(case, case.tokens, model.hidden_dim / tensor)


def _gated_layer(case: BlockCase, tokens: float, hidden: float, count: float = 1.0) -> Passes:
    """A feed-forward layer, with its activation function."""
    model = case.model
    matmuls = _matmul(case, tokens, model.dim, hidden * (2 if model.gated else 1), count)
    matmuls = matmuls.plus(_matmul(case, tokens, hidden, model.dim, count))
    if model.gated:  # tensors of the hidden width read and written; eager: SiLU, then a product
        forward, backward = (3, 5) if case.compiled else (5, 8)
    else:
        forward, backward = (2, 3)
    unit = tokens * hidden * count * case.numerics.activation_bytes
    return matmuls.plus(
        Passes(
            Seconds(memory=case.kernels.memory_bound(forward * unit)),
            Seconds(memory=case.kernels.memory_bound(backward * unit)),
        )
    )


def _experts(case: BlockCase) -> Passes:
    """The router's layers, and the all-to-all transfers to and from the experts of other ranks."""
    model, (tensor, _, expert, _) = case.model, case.layout
    experts = model.experts
    assert experts is not None
    routed = case.tokens * experts.active
    local = max(1.0, experts.count / expert)
    passes = _gated_layer(case, routed / local, experts.hidden_dim / tensor, count=local)
    if experts.shared_hidden_dim:
        passes = passes.plus(_gated_layer(case, case.tokens, experts.shared_hidden_dim / tensor))
    sent = routed * model.dim * case.numerics.activation_bytes / (tensor if case.layout[3] else 1)
    stride = tensor * case.layout[1]
    transfer = 2 * case.collectives.all_to_all(sent, expert, stride)  # dispatch and combine
    permuted = case.kernels.memory_bound(2 * 4 * sent)  # each is a read and a write, twice
    router = _matmul(case, case.tokens, model.dim, experts.count)
    both = Seconds(memory=permuted, expert=transfer)
    return passes.plus(router).plus(Passes(both, both))


def _elementwise(case: BlockCase) -> Passes:
    """Norms, residual connections and position embeddings.

    Per token, tensors of the model's width that are read and written. Compiled: a norm with the
    residual sum before it reads two and writes two, and so does its backward. Eager: the norm 2 and
    the sum 3; backward, the norm 3 and the sum of gradients 3.
    """
    model, (tensor, _, _, sequence_parallel) = case.model, case.layout
    wide = model.dim / (tensor if sequence_parallel else 1)
    heads = (model.n_heads + model.n_kv_heads) * model.head_dim / tensor
    rotary = 0 if model.positions else 2 if case.compiled else 6
    forward, backward = (8, 8) if case.compiled else (10, 12)
    unit = case.tokens * case.numerics.activation_bytes
    launches = KERNELS[case.compiled] * (HOST_S if case.blocking_launches else KERNEL_S)
    memory = case.kernels.memory_bound
    return Passes(
        Seconds(memory=launches + memory(unit * (forward * wide + rotary * heads))),
        Seconds(memory=2 * launches + memory(unit * (backward * wide + rotary * heads))),
    )


def _tensor_communication(case: BlockCase) -> Passes:
    """All-gathers and reduce-scatters, or all-reduces, around attention and feed-forward."""
    tensor = case.layout[0]
    if tensor == 1:
        return Passes(Seconds(), Seconds())
    activations = case.tokens * case.model.dim * case.numerics.activation_bytes
    each = case.collectives.all_gather(activations, tensor, 1)
    gathered = each
    if case.numerics.float8_gather:
        gathered = case.collectives.all_gather(activations / 2, tensor, 1)
    seconds = 2 * (gathered + each)
    if case.overlap_tensor:
        seconds *= 1 - TENSOR_HIDDEN
    both = Seconds(tensor=seconds)
    return Passes(both, both)


@lru_cache(maxsize=65536)
def embedding_passes(case: BlockCase) -> Passes:
    """The embedding: a row is copied for each token, and its gradient added."""
    model, tensor = case.model, case.layout[0]
    unit = case.tokens * model.dim * case.kernels.memory_bound(1.0)
    passes = Passes(Seconds(memory=4 * unit), Seconds(memory=12 * unit))
    if tensor == 1:
        return passes
    activations = case.tokens * model.dim * case.numerics.activation_bytes
    each = case.collectives.all_gather(activations, tensor, 1)
    return passes.plus(Passes(Seconds(tensor=each), Seconds(tensor=each)))


@lru_cache(maxsize=65536)
def output_passes(case: BlockCase) -> Passes:
    """The output layer and the loss.

    Bytes per logit beside the matmul's. Eager: a copy in fp32, log-softmax, its gradient, a copy in
    the compute dtype. Compiled: two passes that read, and the gradient.
    """
    model, tensor = case.model, case.layout[0]
    vocabulary = model.vocab_size / tensor
    kernels = case.kernels
    precision = case.unquantized
    forward = kernels.matmul(case.tokens, model.dim, vocabulary, precision)
    backward = kernels.matmul(case.tokens, vocabulary, model.dim, precision)
    backward += kernels.matmul(model.dim, case.tokens, vocabulary, precision)
    logits = case.tokens * vocabulary
    read = (4, 6) if case.compiled else (16, 14)
    passes = Passes(
        Seconds(matmul=forward, memory=kernels.memory_bound(read[0] * logits)),
        Seconds(matmul=backward, memory=kernels.memory_bound(read[1] * logits)),
    )
    if tensor == 1:
        return passes
    activations = case.tokens * model.dim * case.numerics.activation_bytes
    each = case.collectives.all_gather(activations, tensor, 1)
    return passes.plus(Passes(Seconds(tensor=each), Seconds(tensor=each)))
