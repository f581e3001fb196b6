"""Llama 3 (https://arxiv.org/abs/2407.21783) as a single-device module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Rope, RotaryDecoder, RotarySizes
from titanlite.models.rope import Llama3Scaling, apply_rope
from titanlite.models.spec import ModelSizes


@dataclass(frozen=True)
class Llama3Sizes:
    """The sizes of one Llama 3 model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128_256
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling_factor: float = 1.0
    qk_norm: bool = False
    tied_embeddings: bool = False

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope_scaling(self) -> Llama3Scaling | None:
        return Llama3Scaling(self.rope_scaling_factor) if self.rope_scaling_factor > 1 else None


class LlamaBlockSizes(RotarySizes, Protocol):
    """The sizes that the blocks below read; the size classes of several families have them."""

    @property
    def qk_norm(self) -> bool:
        """RMSNorm on every query and key head."""


class Attention(nn.Module):
    """Grouped-query causal attention with rotary embedding, and optional RMSNorm of q and k.

    `window`: tokens that a token attends to, itself included; 0: all up to itself.
    """

    def __init__(self, sizes: LlamaBlockSizes, window: int = 0):
        super().__init__()
        self.head_width = sizes.head_width
        q_dim, kv_dim = sizes.n_heads * self.head_width, sizes.n_kv_heads * self.head_width
        self.wq = nn.Linear(sizes.dim, q_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, sizes.dim, bias=False)
        self.attend = CausalAttention(window=window)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.wv(x).unflatten(-1, (-1, self.head_width))
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, K] and keys [B, T, Hkv, K], normalized if the model does so."""
        heads = (-1, self.head_width)  # -1: a tensor-parallel rank has only some of the heads
        q = self.q_norm(self.wq(x).unflatten(-1, heads))  # [B, T, H*K] -> [B, T, H, K]
        return q, self.k_norm(self.wk(x).unflatten(-1, heads))


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, sizes: ModelSizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the residual stream.

    `attention`: None for Llama's.
    """

    def __init__(self, sizes: LlamaBlockSizes, attention: nn.Module | None = None):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = attention or Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(RotaryDecoder):
    """The transformer of Llama 3, 3.1 and 3.2."""

    def __init__(self, sizes: Llama3Sizes):
        super().__init__(sizes, lambda index: TransformerBlock(sizes))
