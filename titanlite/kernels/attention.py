"""Causal attention by SDPA, and the key-value cache of generation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from titanlite.kernels.documents import DocumentIndex, document_attention, window_attention
from titanlite.kernels.flash import add_sinks, flash_kernel_for, sdpa


class KeyValueCache:
    """The keys and values of one layer so far, so that generation computes each token once."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of the new tokens [B, H, T, K]; return all [B, H, S, K]."""
        if self.keys is None or self.values is None:
            batch, heads, _, head_dim = keys.shape
            self.keys = keys.new_empty(batch, heads, self.capacity, head_dim)
            self.values = torch.empty_like(self.keys)
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class ParametersOfHeads(nn.Module):
    """A module whose parameters are not those of a linear layer, and are sharded by head."""

    def __init__(self) -> None:
        super().__init__()
        self._local: Callable[[Tensor], Tensor] = lambda weight: weight

    def use_local(self, local: Callable[[Tensor], Tensor]) -> None:
        """Compute with `local(weight)` of each parameter, what this process has of it."""
        self._local = local


class AttentionSinks(ParametersOfHeads):
    """The sinks [H] of `add_sinks`; a module, so that tensor parallelism can shard them."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_heads))

    def forward(self) -> Tensor:
        return self._local(self.weight)


class CausalAttention(nn.Module):
    """Causal attention; a module, so that parallelism can replace its forward.

    `backend` is the kernel; None lets SDPA choose. It is set around each call and nowhere else, so
    that recomputation in backward and compiled blocks run the same kernel. The process-wide flags
    of torch.backends.cuda cannot be used: the cache of compiled graphs ignores them (torch 2.13)
    and would return a graph with another kernel.

    `window`: number of tokens that a token attends to, itself included; 0: to all up to itself.
    `sinks`: number of query heads with an attention sink, for which few kernels exist; 0: none.
    """

    def __init__(self, backend: SDPBackend | None = None, window: int = 0, sinks: int = 0):
        super().__init__()
        self.backend, self.window = backend, window
        self.sinks = AttentionSinks(sinks) if sinks else None

    def use_backend(self, backend: SDPBackend | None) -> None:
        """Use another kernel from now on; None lets SDPA choose."""
        self.backend = backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """q [B, H, T, K] attends to k, v [B, Hkv, T, K]; returns [B, H, T, K].

        H is a multiple of Hkv. `documents`: given if sequences hold several documents.
        """
        sinks = None if self.sinks is None else self.sinks()
        if documents is not None:
            assert cache is None, "generation produces a single document"
            return document_attention(q, k, v, documents, self.window, sinks)
        causal = q.shape[2] > 1  # a single new token attends to everything in the cache
        if cache is not None:
            assert cache.length == 0 or not causal, "only an empty cache takes several tokens"
            k, v = cache.extend(k, v)
        if sinks is not None and (causal or cache is None):
            return document_attention(q, k, v, None, self.window, sinks)
        if self.window and self.window < k.shape[2]:
            if causal:
                return window_attention(q, k, v, self.window, self.backend)
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        if sinks is not None:
            out, lse = flash_kernel_for(q).forward(q, k, v, False)
            return add_sinks(out, lse, sinks)[0]
        return sdpa(q, k, v, self.backend, is_causal=causal)
