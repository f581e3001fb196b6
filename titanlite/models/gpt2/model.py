"""GPT-2 as a single-device module.

Language Models are Unsupervised Multitask Learners, Radford et al., 2019, section 2.3: LayerNorm
before attention and feed-forward, learned positions, GELU, biases, tied embeddings. No dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Decoder
from titanlite.models.embedding import PositionEmbedding


@dataclass(frozen=True)
class GPT2Sizes:
    """The sizes of one GPT-2 model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    hidden_dim: int
    vocab_size: int = 50_257
    positions: int = 1024
    norm_eps: float = 1e-5
    tied_embeddings: bool = True

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads: as many as query heads."""
        return self.n_heads

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.dim // self.n_heads


class GPT2Attention(nn.Module):
    """Causal attention, all of whose linear layers have biases."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__()
        self.head_width = sizes.head_width
        self.wq = nn.Linear(sizes.dim, sizes.dim)
        self.wk = nn.Linear(sizes.dim, sizes.dim)
        self.wv = nn.Linear(sizes.dim, sizes.dim)
        self.wo = nn.Linear(sizes.dim, sizes.dim)
        self.attend = CausalAttention()

    def forward(
        self,
        x: Tensor,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        heads = (-1, self.head_width)  # -1: a tensor-parallel rank has only some of the heads
        q, k, v = (  # [B, T, H*K] -> [B, H, T, K]
            layer(x).unflatten(-1, heads).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]


class GPT2FeedForward(nn.Module):
    """Two linear layers with the tanh form of GELU (https://arxiv.org/abs/1606.08415)."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class GPT2Block(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = GPT2Attention(sizes)
        self.ffn_norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = GPT2FeedForward(sizes)

    def forward(
        self,
        x: Tensor,
        rope: None = None,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), documents, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class GPT2(Decoder):
    """The transformer of GPT-2."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__(
            sizes,
            lambda index: GPT2Block(sizes),
            norm=nn.LayerNorm(sizes.dim, eps=sizes.norm_eps),
            pos_embeddings=PositionEmbedding(sizes.positions, sizes.dim),
        )
