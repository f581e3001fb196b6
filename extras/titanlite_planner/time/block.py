"""Seconds of one micro-batch in a block, in the embedding and in the output layer, on one rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from titanlite_planner.model_shape import ModelShape
from titanlite_planner.time.block_case import BlockCase, Passes, Seconds
from titanlite_planner.time.experts import expert_kernels, expert_passes
from titanlite_planner.time.kernels import BACKWARD_ATTENTION, KERNEL_S
from titanlite_planner.time.layers import feed_forward_passes, linear_passes

KERNELS = {True: 12, False: 40}  # of a block forward, compiled or eager; backward has twice as many
TENSOR_HIDDEN = 0.5
# of the communication of tensor parallelism, where matmuls run in chunks: torchtitan's tables of
# June 2025 gain 4 to 14 % of a step, whose communication is estimated at 19 to 27 % of it
HOST_S = 30e-6
# of the host for an eager kernel, with Python and autograd: added where launches block (BLOOM's
# rows), otherwise a faster GPU waits. 9 to 16 ms for the 390 kernels of a block of Qwen3 30B, 235B
# with 16 experts, in micro-batches of one sequence (Megatron-Bridge 25.11 and 26.02)


class BlockKind(NamedTuple):
    """How blocks of one model differ."""

    experts: bool
    window: int  # tokens that a token attends to; 0: all before it


@lru_cache(maxsize=1024)
def block_kinds(model: ModelShape) -> tuple[BlockKind, ...]:
    """The kind of each block."""
    blocks = range(model.n_layers)
    return tuple(BlockKind(model.has_experts(b), model.window_of(b)) for b in blocks)


@lru_cache(maxsize=65536)
def block_passes(case: BlockCase, kind: BlockKind) -> Passes:
    """One block."""
    attention, projections = _attention(case, kind.window), _projections(case)
    feed_forward = (
        expert_passes(case)
        if kind.experts
        else feed_forward_passes(case, case.tokens, case.model.hidden_dim / case.layout[0])
    )
    passes = projections.plus(attention).plus(feed_forward).plus(_elementwise(case))
    passes = passes.plus(_tensor_communication(case))
    passes = Passes(passes.forward, passes.backward.plus(_recomputed(case, passes, attention)))
    return _with_launches(case, passes, kind.experts)


def _with_launches(case: BlockCase, passes: Passes, experts: bool) -> Passes:
    """A block, with the time that the GPU waits for the host to launch its kernels.

    The host runs ahead of the GPU over forward and backward of a micro-batch.
    """
    if case.exchange.one_graph or case.kernels.gpu.is_cpu:  # a CPU launches nothing
        return passes
    kernels = 3 * KERNELS[case.compiled] + (expert_kernels(case) if experts else 0)
    waiting = max(0.0, HOST_S * kernels - passes.total)
    return passes.plus(Passes(Seconds(host=waiting / 3), Seconds(host=2 * waiting / 3)))


def _recomputed(case: BlockCase, passes: Passes, attention: Passes) -> Seconds:
    """What backward computes again."""
    if case.recompute == "full":
        return passes.forward
    if case.recompute == "selective":
        return Seconds().plus(passes.forward, 1 / max(1, case.recompute_every))
    if case.recompute == "attention":
        return attention.forward
    if case.recompute == "memory_budget":  # the kernels of backward also write their results
        written, beyond = case.recomputed
        again = Seconds().plus(passes.forward, beyond)
        return again if beyond else Seconds(memory=case.kernels.memory_bound(written))
    if case.recompute == "per_operation":  # every second matmul, and what is memory-bound
        forward = passes.forward
        return Seconds(matmul=forward.matmul / 2, memory=forward.memory, tensor=forward.tensor / 2)
    return Seconds()


def _projections(case: BlockCase) -> Passes:
    """Queries, keys and values, and the output projection."""
    model, tensor, tokens = case.model, case.layout[0], case.tokens
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    out = linear_passes(case, tokens, model.n_heads * model.value_dim / tensor, model.dim)
    if (latent := model.latent) is None:  # in one matmul
        return out.plus(linear_passes(case, tokens, model.dim, (queries + 2 * keys) / tensor))
    narrow = latent.key_value_rank + latent.rotary_dim + latent.query_rank  # on every tensor rank
    unrotated = model.head_dim - latent.rotary_dim
    to_heads = model.n_heads * (unrotated + latent.value_dim) / tensor
    passes = out.plus(linear_passes(case, tokens, model.dim, narrow))
    passes = passes.plus(linear_passes(case, tokens, latent.key_value_rank, to_heads))
    width = latent.query_rank or model.dim
    return passes.plus(linear_passes(case, tokens, width, queries / tensor))


def _attention(case: BlockCase, window: int = 0) -> Passes:
    """The core attention, with the exchange of keys and values over the context ranks."""
    model, (tensor, context, _, _) = case.model, case.layout
    kernels, batch = case.kernels, case.micro_batch
    heads = model.n_heads / tensor
    if case.fused_attention:
        widths = model.head_dim, model.value_dim
        flops = kernels.flash_flops(batch, case.seq_len, heads, widths, window) / context
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
    features = model.n_kv_heads * (model.head_dim + model.value_dim)
    kv = features / tensor * case.numerics.activation_bytes
    exchanged = case.collectives.all_gather(kv * case.tokens * context, context, tensor)
    hidden = passes.forward.attention, passes.backward.attention
    first = exchanged / context  # the exchange overlaps with the attention of the part before
    exposed = (
        max(first, case.collectives.exposed(exchanged, hidden[0])),
        max(2 * first, case.collectives.exposed(2 * exchanged, hidden[1])),
    )
    return Passes(
        passes.forward.plus(Seconds(context=exposed[0])),
        passes.backward.plus(Seconds(context=exposed[1])),
    )


def _elementwise(case: BlockCase) -> Passes:
    """Norms, residual connections and position embeddings.

    Per token, tensors of the model's width that are read and written. Compiled: a norm with the
    residual sum before it reads two and writes two, and so does its backward. Eager: the norm 2 and
    the sum 3; backward, the norm 3 and the sum of gradients 3. Inductor (benchmarks/gpu_bytes.md):
    backward reads the gradients of three matmuls, or of two, and its input, and reads both again
    for the gradient of its weights; then the gradient of the sum, which it writes: 10 and 8.
    """
    model, (tensor, _, _, sequence_parallel) = case.model, case.layout
    wide = model.dim / (tensor if sequence_parallel else 1)
    heads = (model.n_heads + model.n_kv_heads) * model.head_dim / tensor
    rotary = 0 if model.positions else 2 if case.compiled else 6
    forward, backward = (8, 8) if case.compiled else (10, 12)
    if case.compiled and case.counted_kernels:
        backward = 18
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
    the compute dtype. Compiled: one pass that reads, and one that overwrites them. titanlite's loss
    also scales the gradient of its weights.
    """
    model, tensor = case.model, case.layout[0]
    vocabulary = model.vocab_size / tensor
    kernels = case.kernels
    precision = case.unquantized
    forward = kernels.matmul(case.tokens, model.dim, vocabulary, precision)
    backward = kernels.matmul(case.tokens, vocabulary, model.dim, precision)
    backward += kernels.matmul(model.dim, case.tokens, vocabulary, precision)
    slower = kernels.unaligned(math.ceil(vocabulary), precision)
    logits = case.tokens * vocabulary
    read = (2, 4) if case.compiled else (16, 14)
    summed = vocabulary * model.dim * case.output_grad_bytes
    passes = Passes(
        Seconds(matmul=forward * slower, memory=kernels.memory_bound(read[0] * logits)),
        Seconds(matmul=backward * slower, memory=kernels.memory_bound(read[1] * logits + summed)),
    )
    if tensor == 1:
        return passes
    activations = case.tokens * model.dim * case.numerics.activation_bytes
    each = case.collectives.all_gather(activations, tensor, 1)
    return passes.plus(Passes(Seconds(tensor=each), Seconds(tensor=each)))
