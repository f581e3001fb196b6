"""Attention within documents that are packed into one sequence.

Each token attends only to its own document, whose positions count from 0. The positions alone mark
where documents begin. A sequence that begins in the middle of a document treats the rest of it as a
document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from titanlite.kernels.flash import CudaFlash, flash_kernel_for, repeat_kv_heads


@runtime_checkable
class SupportsDocuments(Protocol):
    """A model that can mask documents: it calls `index_documents` once per forward, and passes the
    result to the attention of every block."""

    index_documents: Callable[[Tensor], Tensor] | None
    # positions [B, T] -> the `documents` argument of CausalAttention; None: causal mask only

    def use_document_mask(self, index_documents: Callable[[Tensor], Tensor]) -> None: ...


def document_positions(inputs: Tensor, end: int) -> Tensor:
    """Position of each token [B, T] in its document (0, 1, 2, …), which ends with the id `end`."""
    index = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    first = torch.zeros_like(index)
    first[:, 1:] = torch.where(inputs[:, :-1] == end, index[:, 1:], 0)
    return index - first.cummax(dim=1).values


def document_boundaries(positions: Tensor) -> Tensor:
    """The start of each document and the end of the last, int32 [N + 1], as offsets into B*T.

    From `positions` [B, T]. The host must know N, so it waits for a GPU once per forward.
    """
    starts = (positions.flatten() == 0).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    torch._dynamo.maybe_mark_dynamic(boundaries, 0)  # otherwise every new N causes a recompilation
    return boundaries


def document_attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    """Causal attention within each document: q [B, H, T, K] attends to k, v [B, Hkv, T, K]."""
    if isinstance(flash_kernel_for(q), CudaFlash):
        return _varlen_attention(q, k, v, boundaries)
    k, v = (repeat_kv_heads(tensor, q) for tensor in (k, v))  # once, not for each document
    out, _ = _document_forward(q, k, v, boundaries)
    return out


# --- one call for all documents: a GPU -----------------------------------------------------------


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> Tensor:
    # No document is longer than a sequence. A tighter bound would save the kernel some empty
    # blocks, but the host would have to wait for it, and each new value causes a recompilation.
    batch, _, longest, _ = q.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))  # [B*T, H, K]
    # Imported here: it imports the compiler, which takes half a second.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}  # causal
    # Torch 2.11 has no `enable_gqa`; its kernel supports grouped heads without being asked.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **options)
    assert isinstance(out, Tensor), "a tuple only with return_aux"
    return out.unflatten(0, (batch, longest)).transpose(1, 2)


# --- one call per document: a CPU, and fp32 on a GPU ----------------------------------------------
# A custom operator, so that a compiled graph has one node, however many documents there are.


@torch.library.custom_op("titanlite::attend_in_documents", mutates_args=())
def _document_forward(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, T, K], log-sum-exp of the scores [B, H, T] in fp32)."""
    kernel, (out, lse) = flash_kernel_for(q), _empty_document_forward(q, k, v, boundaries)
    for index in _document_slices(boundaries, q.shape[2]):
        out[index], lse[index] = kernel.forward(q[index], k[index], v[index], True)
    return out, lse


@torch.library.custom_op("titanlite::attend_in_documents_backward", mutates_args=())
def _document_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from `grad`, the gradient of `out`."""
    kernel = flash_kernel_for(q)
    totals = _empty_document_backward(grad, q, k, v, out, lse, boundaries)
    for index in _document_slices(boundaries, q.shape[2]):
        partial_grads = kernel.backward(
            grad[index], q[index], k[index], v[index], out[index], lse[index].contiguous(), True
        )
        for total, partial_grad in zip(totals, partial_grads, strict=True):
            total[index] = partial_grad
    return totals


def _document_slices(boundaries: Tensor, seq_len: int) -> Iterator[tuple[slice, slice, slice]]:
    """The index of each document in [B, H, T, …]."""
    for start, end in pairwise(boundaries.tolist()):
        row, first = divmod(start, seq_len)
        yield slice(row, row + 1), slice(None), slice(first, first + end - start)


@_document_forward.register_fake
def _empty_document_forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor
) -> tuple[Tensor, Tensor]:
    return _empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_document_backward.register_fake
def _empty_document_backward(grad, q, k, v, out, lse, boundaries) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_heads(q), _empty_like_heads(k), _empty_like_heads(v)


def _empty_like_heads(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape [B, H, T, K], stored as [B, T, H, K]."""
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def _save_for_document_backward(ctx, inputs, output) -> None:
    q, k, v, boundaries = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries)


def _document_autograd(ctx, grad: Tensor, _):
    return *_document_backward(grad, *ctx.saved_tensors), None


_document_forward.register_autograd(_document_autograd, setup_context=_save_for_document_backward)
