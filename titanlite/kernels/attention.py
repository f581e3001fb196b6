"""Attention by SDPA, and the keys and values that generation keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titanlite.kernels.documents import document_attention
from titanlite.kernels.flash import repeat_kv_heads


class KeyValueCache:
    """The keys and values of one layer so far; what lets generation read each token once."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values [B, H, S, K] once those of the new tokens [B, H, T, K] are added."""
        if self.keys is None:
            batch, heads, _, width = keys.shape
            self.keys = keys.new_empty(batch, heads, self.capacity, width)
            self.values = torch.empty_like(self.keys)
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class CausalAttention(nn.Module):
    """Causal attention without weights; a module, so that another way to run it can take its place.

    `backend` is the kernel; None leaves it to SDPA. It is chosen around the call and nowhere else:
    whoever runs a block, be it to compute its activations again, runs the same kernel, and so does
    a compiled block. Torch's flags for the whole process would do for that, but (torch 2.13) the
    cache of compiled graphs is not asked by them: it would give back another kernel.
    """

    def __init__(self, backend: SDPBackend | None = None):
        super().__init__()
        self.backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """q [B, H, T, K] over k, v [B, Hkv, T, K] to [B, H, T, K]; H is a multiple of Hkv.

        `documents`, where a sequence holds several, is what `document_boundaries` says of them.
        """
        if documents is not None:
            assert cache is None, "generation writes one document"
            return document_attention(q, k, v, documents)
        causal = q.shape[2] > 1  # one new token sees everything there is
        if cache is not None:
            assert cache.length == 0 or not causal, (
                "several tokens at once only into an empty cache"
            )
            k, v = cache.extend(k, v)
        grouped = q.shape[1] != k.shape[1]
        if grouped and self.backend == SDPBackend.EFFICIENT_ATTENTION:  # wants one for each query
            k, v = repeat_kv_heads(k, q), repeat_kv_heads(v, q)
            grouped = False
        if self.backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
