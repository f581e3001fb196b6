"""Llama 3 (https://arxiv.org/abs/2407.21783) as a single-device module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex, IndexDocuments
from titanlite.models.embedding import TokenEmbedding
from titanlite.models.loss import OutputLayer
from titanlite.models.rope import Llama3Scaling, apply_rope, rope_cos_sin


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


class Attention(nn.Module):
    """Grouped-query causal attention with rotary embedding, and optional RMSNorm of q and k."""

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.head_width = sizes.head_width
        q_dim, kv_dim = sizes.n_heads * self.head_width, sizes.n_kv_heads * self.head_width
        self.wq = nn.Linear(sizes.dim, q_dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, sizes.dim, bias=False)
        self.attend = CausalAttention()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        heads = (-1, self.head_width)  # -1: a tensor-parallel rank has only some of the heads
        q = self.q_norm(self.wq(x).unflatten(-1, heads))  # [B, T, H*K] -> [B, T, H, K]
        k = self.k_norm(self.wk(x).unflatten(-1, heads))
        v = self.wv(x).unflatten(-1, heads)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [B, T] to logits [B, T, V], or, with labels [B, T], to their summed loss.

    A pipeline stage has only its own blocks in `layers`; other modules that it does not own are
    None.
    """

    def __init__(self, sizes: Llama3Sizes):
        super().__init__()
        self.sizes = sizes
        self.index_documents: IndexDocuments | None = None
        self.tok_embeddings = TokenEmbedding(sizes.vocab_size, sizes.dim)
        blocks = {str(i): TransformerBlock(sizes) for i in range(sizes.n_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.output = OutputLayer(sizes.dim, sizes.vocab_size)
        if sizes.tied_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def use_document_mask(self, index_documents: IndexDocuments) -> None:
        """Attend within documents only; see `SupportsDocuments`."""
        self.index_documents = index_documents

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        caches: dict[str, KeyValueCache] | None = None,
        labels: Tensor | None = None,
        documents: DocumentIndex | None = None,
    ) -> Tensor:
        """`positions` [T] or [B, T] count from the start of each sequence, or of each document in
        it; default: 0, 1, 2, … To derive missing `documents` from them, the host waits for a GPU.
        """
        sizes = self.sizes
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rope = rope_cos_sin(positions, sizes.head_width, sizes.rope_theta, sizes.rope_scaling)
        if documents is None and self.index_documents is not None:
            documents = self.index_documents(positions.expand(len(tokens), -1)).to(tokens.device)
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for name, block in self.layers.items():
            x = block(x, rope, documents, None if caches is None else caches[name])
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels=labels)
