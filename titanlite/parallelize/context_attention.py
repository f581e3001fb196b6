"""Context parallel, the computation: attention of local queries over the keys of all ranks.

The forward and backward are custom ops, so that the compiler sees one node and not the
communication inside. Signatures of custom ops are flat lists of tensors, strings and numbers
(torch.library), hence their many parameters.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.kernels.flash import add_sinks, flash_kernel_for, sinks_gradient, window_mask
from titanlite.parallelize.context_tiles import (
    ALL,
    AttentionTile,
    SequenceShard,
    TilesWithKeysOf,
    causal_tiles,
    decode_document_tiles,
    window_tiles,
)
from titanlite.parallelize.kv_exchange import KV_EXCHANGES, KVExchange

TOKEN_DIM = 2  # of [B, H, T, K]


@torch.library.custom_op("titanlite::attend_over_ranks", mutates_args=())
def context_parallel_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    group_name: str,
    balanced: bool,
    rotate_method: str,
    window: int,
    cudnn: bool,
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries over the keys and values of all ranks of a group.

    q [B, H, T, K], k and v [B, Hkv, T, K], where T counts this rank's tokens. `sinks` [H]: see
    `add_sinks`. `documents`: the result of `encode_document_tiles`, or None. `window`: tokens that
    a token attends to, itself included; 0: all up to itself. `cudnn`: see `flash_kernel_for`.
    Returns the output [B, H, T, K] and the log-sum-exp of the scores [B, H, T] in fp32.
    """
    kernel = flash_kernel_for(q, cudnn)
    options = group_name, balanced, rotate_method, window
    exchange, tiles_with_keys_of = _plan_attention(q, documents, *options)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    for source, (keys, values) in exchange.iterate_shards(torch.stack((k, v))):
        for tile in tiles_with_keys_of(source):
            q_index = (tile.sequences, ALL, tile.queries)
            k_index = (tile.sequences, ALL, tile.keys)
            parts = q[q_index], keys[k_index], values[k_index]
            mask = _mask_of_tile(tile, parts[0], parts[1], window)
            tile_out, tile_lse = kernel.forward(*parts, mask)
            if tile.causal:  # the first tile of these queries
                out[q_index], lse[q_index] = tile_out, tile_lse
            else:
                _merge_tile(out[q_index], lse[q_index], tile_out, tile_lse)
    out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _mask_of_tile(tile: AttentionTile, q: Tensor, k: Tensor, window: int) -> bool | Tensor:
    """The mask of a tile's queries and keys; a tensor only if some are outside of the window."""
    widest = tile.offset + q.shape[TOKEN_DIM]
    return window_mask(q, k, tile.offset, window) if 0 < window < widest else tile.causal


def _merge_tile(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Add the keys of another tile to an output and its log-sum-exp, in place."""
    total = torch.logaddexp(lse, tile_lse)
    out.mul_((lse - total).exp().unsqueeze(-1))
    out.add_(tile_out * (tile_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


@torch.library.custom_op("titanlite::attend_over_ranks_backward", mutates_args=())
def context_parallel_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group_name: str,
    balanced: bool,
    rotate_method: str,
    window: int,
    cudnn: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of q [B, H, T, K], and of k and v in one tensor [2, B, Hkv, T, K]."""
    kernel = flash_kernel_for(q, cudnn)
    options = group_name, balanced, rotate_method, window
    exchange, tiles_with_keys_of = _plan_attention(q, documents, *options)
    dq = torch.zeros_like(q, dtype=torch.float32)

    def compute_shard_gradient(source: int, keys_values: Tensor) -> Tensor | None:
        """Gradient of one rank's keys and values from this rank's queries; adds to `dq`."""
        source_tiles = tiles_with_keys_of(source)
        if not source_tiles:
            return None
        dkv = torch.zeros_like(keys_values, dtype=torch.float32)
        for tile in source_tiles:
            q_index = (tile.sequences, ALL, tile.queries)
            kv_index = (ALL, tile.sequences, ALL, tile.keys)
            keys, values = keys_values[kv_index]
            # `lse` is that of all keys, so the gradients of the tiles add up.
            tile_dq, tile_dk, tile_dv = kernel.backward(
                grad_out[q_index],
                q[q_index],
                keys,
                values,
                out[q_index],
                lse[q_index].contiguous(),
                _mask_of_tile(tile, q[q_index], keys, window),
            )
            dq[q_index] += tile_dq
            dk, dv = dkv[kv_index]
            dk += tile_dk
            dv += tile_dv
        return dkv

    # Called before dq is cast, because it fills dq. A test in fp32 would not detect the wrong
    # order, because there `.to` does not copy.
    dkv = exchange.sum_gradients(torch.stack((k, v)), compute_shard_gradient)
    return dq.to(q.dtype), dkv.to(k.dtype)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of a name, which custom ops have as an argument."""
    # Private, but how torch's own ops find a group by its name (2.11 to 2.15).
    resolve = dist.distributed_c10d._resolve_process_group
    return resolve(name)  # type: ignore[arg-type]  # GroupName is a private subtype of str


def _plan_attention(
    q: Tensor,
    documents: Tensor | None,
    group_name: str,
    balanced: bool,
    rotate_method: str,
    window: int,
) -> tuple[KVExchange, TilesWithKeysOf]:
    group = resolve_group(group_name)
    exchange = KV_EXCHANGES[rotate_method](group)
    if documents is not None:
        return exchange, decode_document_tiles(documents, window).__getitem__
    shard, tokens = SequenceShard(group.rank(), group.size(), balanced), q.shape[TOKEN_DIM]
    if window:
        return exchange, partial(window_tiles, shard, tokens, window)
    return exchange, partial(causal_tiles, shard, tokens)


@context_parallel_forward.register_fake
def _allocate_context_parallel_forward(q, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@context_parallel_backward.register_fake
def _allocate_context_parallel_backward(grad_out, q, k, *_):
    return torch.empty_like(q), k.new_empty((2, *k.shape))


def _save_context_parallel_inputs(ctx, inputs, output) -> None:
    q, k, v, sinks, documents, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, documents, sinks)


def _backward_of_context_parallel(ctx, grad_out: Tensor, _grad_lse):
    *saved, sinks = ctx.saved_tensors
    dq, (dk, dv) = context_parallel_backward(grad_out, *saved, *ctx.options)
    d_sinks = None if sinks is None else sinks_gradient(grad_out, saved[3], saved[4], sinks)
    return dq, dk, dv, d_sinks, *[None] * 6


context_parallel_forward.register_autograd(
    _backward_of_context_parallel, setup_context=_save_context_parallel_inputs
)
