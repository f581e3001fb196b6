"""Documents that share a sequence: each attends to itself alone, and counts its positions from 0.

Where they begin is said by the positions, so whoever knows those knows all; a sequence that starts
amid a document starts one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from titanlite.kernels.flash import CudaFlash, flash_kernel_for, repeat_kv_heads


def document_positions(inputs: Tensor, end: int) -> Tensor:
    """Where each token [B, T] is in its document, 0, 1, 2, …; one ends with the id `end`."""
    steps = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    first = torch.zeros_like(steps)
    first[:, 1:] = torch.where(inputs[:, :-1] == end, steps[:, 1:], 0)
    return steps - first.cummax(dim=1).values


def document_boundaries(positions: Tensor) -> Tensor:
    """Where documents begin and the last ends, [N + 1] in int32, in `positions` [B, T] laid end to
    end. How many there are, the host must learn: once in a forward it waits for a GPU."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    torch._dynamo.maybe_mark_dynamic(ends, 0)  # else every new N would be compiled for
    return ends


def document_attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    """Causal attention within each document: q [B, H, T, K] over k, v [B, Hkv, T, K]."""
    if isinstance(flash_kernel_for(q), CudaFlash):
        return _attend_at_once(q, k, v, ends)
    k, v = (repeat_kv_heads(part, q) for part in (k, v))  # here once, instead of for each document
    out, _ = _attend_one_by_one(q, k, v, ends)
    return out


# --- all in one call: a GPU ----------------------------------------------------------------------


def _attend_at_once(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> Tensor:
    # No document is longer than a sequence. A nearer bound would spare the kernel blocks that
    # find nothing to do, but is another number for the host to wait for, and to compile for.
    rows, _, longest, _ = q.shape
    packed = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # [B*T, H, K]
    causal = {"window_size": (-1, 0)}
    # Imported here: it brings the compiler along, which takes half a second.
    from torch.nn.attention.varlen import varlen_attn

    # Torch 2.11 has no such word; its kernel serves grouped heads unasked, as others do when asked.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options = {"enable_gqa": True} if grouped else {}
    out = varlen_attn(*packed, ends, ends, longest, longest, **causal, **options)
    return out.unflatten(0, (rows, longest)).transpose(1, 2)


# --- one by one: a CPU, and fp32 on a GPU ---------------------------------------------------------
# An operation of its own, so that a compiled graph holds one node however many documents there are.


@torch.library.custom_op("titanlite::attend_in_documents", mutates_args=())
def _attend_one_by_one(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, T, K], the logarithm of the sum of scores [B, H, T])."""
    flash, (out, lse) = flash_kernel_for(q), _room_for_forward(q, k, v, ends)
    for at in _documents(ends, q.shape[2]):
        out[at], lse[at] = flash.forward(q[at], k[at], v[at], True)
    return out, lse


@torch.library.custom_op("titanlite::attend_in_documents_backward", mutates_args=())
def _backward_one_by_one(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    flash, into = flash_kernel_for(q), _room_for_backward(gradient, q, k, v, out, lse, ends)
    for at in _documents(ends, q.shape[2]):
        parts = (part[at] for part in (gradient, q, k, v, out))
        gradients = flash.backward(*parts, lse[at].contiguous(), True)
        for whole, part in zip(into, gradients, strict=True):
            whole[at] = part
    return into


def _documents(ends: Tensor, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Where in [B, H, T, …] each document is."""
    starts = ends.tolist()
    for start, end in pairwise(starts):
        row, first = divmod(start, length)
        yield slice(row, row + 1), slice(None), slice(first, first + end - start)


@_attend_one_by_one.register_fake
def _room_for_forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return _room_for(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward_one_by_one.register_fake
def _room_for_backward(gradient, q, k, v, out, lse, ends) -> tuple[Tensor, Tensor, Tensor]:
    return _room_for(q), _room_for(k), _room_for(v)


def _room_for(part: Tensor) -> Tensor:
    """Memory like that of [B, H, T, K], in which the heads of a token lie together."""
    rows, heads, tokens, width = part.shape
    return part.new_empty(rows, tokens, heads, width).transpose(1, 2)


def _keep(ctx, inputs, output) -> None:
    q, k, v, ends = inputs
    ctx.save_for_backward(q, k, v, *output, ends)


def _backward(ctx, gradient: Tensor, _):
    return *_backward_one_by_one(gradient, *ctx.saved_tensors), None


_attend_one_by_one.register_autograd(_backward, setup_context=_keep)
