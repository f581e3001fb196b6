"""Attention within documents that are packed into one sequence.

Each token attends only to its own document, whose positions count from 0. The positions alone mark
where documents begin. What a sequence has of a document that began before it is a document.

The host finds the documents before their tokens are on the device: no forward waits for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.kernels.flash import (
    CudaFlash,
    add_sinks,
    flash_kernel_for,
    repeat_kv_heads,
    sdpa,
    sinks_gradient,
    window_mask,
)
from titanlite.labels import DOCUMENT_END, SAME_DOCUMENT

QUERY_TILE = 128  # the most queries that one block of a FlashAttention kernel computes


@dataclass(frozen=True)
class DocumentIndex:
    """Where the documents of one micro-batch are: the `documents` argument of CausalAttention.

    Not a tuple: FSDP would copy the host's table to the device, and wait for it.
    """

    on_host: Tensor  # the start of each document and the end of the last: int32 [N + 1], offsets
    # into B*T; under context parallel int64 [N, 9], see parallelize/context_tiles.py
    on_device: Tensor  # the same on the device, for kernels; before `to`, the host's
    extent: Tensor  # no elements; its shape is [0, longest]. torch.compile would make a graph for
    # each value of an int, but makes only one for a dimension that is marked as dynamic.

    @classmethod
    def build(cls, table: Tensor, longest: int = 0) -> DocumentIndex:
        """The index of a host's `table`; `longest` is the length of the longest document."""
        # rounded up, which does not change the number of blocks that the kernel launches
        rounded = -(-longest // QUERY_TILE) * QUERY_TILE
        return cls(table, table, table.new_empty(0, rounded))

    @property
    def longest(self) -> int:
        """An upper bound of the tokens in a document; 0 under context parallel, and unused."""
        return self.extent.shape[1]

    def pin_memory(self) -> DocumentIndex:
        """A copy in pinned memory, from which `to` copies to a GPU without waiting for it."""
        pinned = self.on_host.pin_memory()
        return DocumentIndex(pinned, pinned, self.extent)

    def to(self, device: torch.device) -> DocumentIndex:
        """The index for kernels on `device`. Sizes are dynamic: one graph for all of them."""
        on_device = self.on_host.to(device, non_blocking=True)
        extent = on_device.new_empty(self.extent.shape)
        for tensor, dim in ((self.on_host, 0), (on_device, 0), (extent, 1)):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return DocumentIndex(self.on_host, on_device, extent)


IndexDocuments = Callable[[Tensor], DocumentIndex]  # positions [B, T] -> index in host memory


@runtime_checkable
class SupportsDocuments(Protocol):
    """A model whose attention can be restricted to single documents.

    Its forward passes the argument `documents`, a DocumentIndex, to the attention of every block.
    Without that argument it computes the index from the positions, if `index_documents` is set.
    """

    index_documents: IndexDocuments | None  # None: causal mask only

    def use_document_mask(self, index_documents: IndexDocuments) -> None: ...


def document_positions(inputs: Tensor, end: int, labels: Tensor | None = None) -> Tensor:
    """Position of each token [B, T] in its document (0, 1, 2, …).

    A document ends with the id `end`; in a packed sequence, at the token with label DOCUMENT_END.
    """
    ends = inputs == end
    if labels is not None:
        document_ends = labels == DOCUMENT_END
        is_packed = (document_ends | (labels == SAME_DOCUMENT)).any(dim=1, keepdim=True)
        ends = torch.where(is_packed, document_ends, ends)
    index = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    first = torch.zeros_like(index)
    first[:, 1:] = torch.where(ends[:, :-1], index[:, 1:], 0)
    return index - first.cummax(dim=1).values


def index_documents(positions: Tensor) -> DocumentIndex:
    """The index of the documents in `positions` [B, T]; waits for the device if they are there."""
    starts = (positions.cpu().flatten() == 0).nonzero().flatten()
    boundaries = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    return DocumentIndex.build(boundaries, longest=int(boundaries.diff().max()))


def document_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: DocumentIndex | None,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document: q [B, H, T, K] attends to k, v [B, Hkv, T, K].

    With a `window`, a token attends to that number of tokens of its document, itself included.
    `documents` None: each sequence is one. `sinks` [H]: see `add_sinks`.
    """
    boundaries, longest = None, q.shape[2]
    if not isinstance(flash_kernel_for(q), CudaFlash):
        boundaries = None if documents is None else documents.on_host
        k, v = (repeat_kv_heads(tensor, q) for tensor in (k, v))  # once, not for each document
    elif documents is not None:
        boundaries, longest = documents.on_device, documents.longest
        if sinks is None:
            return _varlen_attention(q, k, v, boundaries, window, longest)
    out, _ = _document_forward(q, k, v, sinks, boundaries, window, longest)
    return out


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, backend: SDPBackend | None
) -> Tensor:
    """Causal attention in a sliding window: q [B, H, T, K] attends to k, v [B, Hkv, T, K].

    FlashAttention skips what is outside of the window. Other kernels have a mask [T, T].
    """
    is_flash = backend in (None, SDPBackend.FLASH_ATTENTION)
    if is_flash and isinstance(flash_kernel_for(q), CudaFlash):
        return _varlen_attention(q, k, v, _sequence_starts(q), window, q.shape[2])
    return sdpa(q, k, v, backend, attn_mask=window_mask(q, k, 0, window))


def _sequence_starts(q: Tensor) -> Tensor:
    """The boundaries of the sequences of q [B, H, T, K], as those of documents."""
    batch, _, tokens, _ = q.shape
    return torch.arange(batch + 1, dtype=torch.int32, device=q.device) * tokens


# --- one call for all documents: CudaFlash -------------------------------------------------------


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int, longest: int
) -> Tensor:
    # The kernel launches blocks for `longest` tokens of every document; those past its end exit.
    batch = len(q)
    q, k, v = map(_pack_sequences, (q, k, v))
    # Imported here: it imports the compiler, which takes half a second.
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (window - 1, 0)}  # causal; -1: no limit
    # Torch 2.11 has no `enable_gqa`; its kernel always supports grouped heads.
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    # Torch 2.15 would prefer cuDNN, which makes a plan for each number of documents and `longest`.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = varlen_attn(q, k, v, boundaries, boundaries, longest, longest, **options)
    assert isinstance(out, Tensor), "a tuple only with return_aux"
    return _unpack_sequences(out, batch)


def _pack_sequences(tensor: Tensor) -> Tensor:
    """[B, H, T, K] to [B*T, H, K]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _unpack_sequences(packed: Tensor, batch: int) -> Tensor:
    """[B*T, H, K] to [B, H, T, K]."""
    return packed.unflatten(0, (batch, -1)).transpose(1, 2)


# With sinks, the backward needs another `out` and log-sum-exp than varlen_attn has saved. These are
# the operators that it calls (torch 2.11 to 2.15), which have no documented interface.


def _varlen_options(q: Tensor, boundaries: Tensor | None, window: int, longest: int) -> tuple:
    """(boundaries and lengths of queries and keys, whether causal, the window), as varlen_attn."""
    boundaries = _sequence_starts(q) if boundaries is None else boundaries
    limits = {"window_size_left": window - 1, "window_size_right": 0}  # -1: no limit
    return (boundaries, boundaries, longest, longest, 0.0, not window), limits


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor]:
    options, limits = _varlen_options(q, boundaries, window, longest)
    forward = torch.ops.aten._flash_attention_forward
    out, lse, *_ = forward(*map(_pack_sequences, (q, k, v)), *options, False, **limits)
    lse = lse.unflatten(1, (len(q), -1)).transpose(0, 1)  # [H, B*T] -> [B, H, T]
    return _unpack_sequences(out, len(q)), lse.contiguous()


def _varlen_backward(
    tensors: Sequence[Tensor], lse: Tensor, boundaries: Tensor | None, window: int, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `tensors`: that of `out`, and q, k, v and `out`."""
    q = tensors[1]
    options, limits = _varlen_options(q, boundaries, window, longest)
    packed_lse = lse.transpose(0, 1).flatten(1).contiguous()
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    backward = torch.ops.aten._flash_attention_backward
    grads = backward(*map(_pack_sequences, tensors), packed_lse, *options, *no_dropout, **limits)
    dq, dk, dv = (_unpack_sequences(grad, len(q)) for grad in grads)
    return dq, dk, dv


# --- a custom operator ---------------------------------------------------------------------------
# On a CPU, and on a GPU without FlashAttention, it is one call per document: a compiled graph has
# one node, however many documents there are. The boundaries are in host memory, because Python
# makes slices from them. With FlashAttention it is one call, only used with sinks.


@torch.library.custom_op("titanlite::attend_in_documents", mutates_args=())
def _document_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    boundaries: Tensor | None,
    window: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, T, K], log-sum-exp of the scores [B, H, T] in fp32, with that of `sinks`).

    `boundaries` None: each sequence is a document.
    """
    kernel = flash_kernel_for(q)
    if isinstance(kernel, CudaFlash):
        return add_sinks(*_varlen_forward(q, k, v, boundaries, window, longest), sinks)
    out, lse = _empty_document_forward(q)
    for index in _document_slices(boundaries, q.shape[2]):
        parts = q[index], k[index], v[index]
        mask = _mask_of_document(parts[0], window)
        out[index], lse[index] = kernel.forward(*parts, mask)
    return add_sinks(out, lse, sinks)


@torch.library.custom_op("titanlite::attend_in_documents_backward", mutates_args=())
def _document_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    boundaries: Tensor | None,
    window: int,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = flash_kernel_for(q)
    if isinstance(kernel, CudaFlash):
        return _varlen_backward((grad, q, k, v, out), lse, boundaries, window, longest)
    totals = _empty_document_backward(grad, q, k, v)
    for index in _document_slices(boundaries, q.shape[2]):
        partial_grads = kernel.backward(
            grad[index],
            q[index],
            k[index],
            v[index],
            out[index],
            lse[index].contiguous(),
            _mask_of_document(q[index], window),
        )
        for total, partial_grad in zip(totals, partial_grads, strict=True):
            total[index] = partial_grad
    return totals


def _mask_of_document(q: Tensor, window: int) -> bool | Tensor:
    """The mask of a document's tokens; True, causal, if all are in one window."""
    return window_mask(q, q, 0, window) if 0 < window < q.shape[2] else True


def _document_slices(
    boundaries: Tensor | None, seq_len: int
) -> Iterator[tuple[slice, slice, slice]]:
    """The index of each document in [B, H, T, …]; of all sequences, if each is one."""
    if boundaries is None:
        yield slice(None), slice(None), slice(None)
        return
    for start, end in pairwise(boundaries.tolist()):
        row, first = divmod(start, seq_len)
        yield slice(row, row + 1), slice(None), slice(first, first + end - start)


@_document_forward.register_fake
def _empty_document_forward(q: Tensor, *_) -> tuple[Tensor, Tensor]:
    return _empty_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_document_backward.register_fake
def _empty_document_backward(grad, q, k, v, *_) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_like_heads(q), _empty_like_heads(k), _empty_like_heads(v)


def _empty_like_heads(tensor: Tensor) -> Tensor:
    """An empty tensor of the same shape [B, H, T, K], stored as [B, T, H, K]."""
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)


def _save_for_document_backward(ctx, inputs, output) -> None:
    q, k, v, sinks, boundaries, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, boundaries, sinks)


def _document_autograd(ctx, grad: Tensor, _):
    *saved, sinks = ctx.saved_tensors
    grads = _document_backward(grad, *saved, *ctx.options)
    d_sinks = None if sinks is None else sinks_gradient(grad, saved[3], saved[4], sinks)
    return *grads, d_sinks, None, None, None


_document_forward.register_autograd(_document_autograd, setup_context=_save_for_document_backward)
