"""OLMo 2 (https://arxiv.org/abs/2501.00656, section 3.1): norms behind attention and feed-forward,
and norms of the queries and of the keys of all heads together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Rope, RotaryDecoder
from titanlite.models.llama3.model import FeedForward
from titanlite.models.rope import apply_rope


@dataclass(frozen=True)
class Olmo2Sizes:
    """The sizes of one OLMo 2 model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 100_352
    norm_eps: float = 1e-6
    rope_theta: float = 500_000.0
    tied_embeddings: bool = False

    rope_scaling = None
    qk_norm = True

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.dim // self.n_heads


class Olmo2Attention(nn.Module):
    """Grouped-query causal attention with rotary embedding."""

    def __init__(self, sizes: Olmo2Sizes):
        super().__init__()
        self.head_width = sizes.head_width
        kv_dim = sizes.n_kv_heads * self.head_width
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.q_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.k_norm = nn.RMSNorm(kv_dim, eps=sizes.norm_eps)
        self.attend = CausalAttention()

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        heads = (-1, self.head_width)  # -1: a tensor-parallel rank has only some of the heads
        q = self.q_norm(self.wq(x)).unflatten(-1, heads)  # [B, T, H*K] -> [B, T, H, K]
        k = self.k_norm(self.wk(x)).unflatten(-1, heads)
        v = self.wv(x).unflatten(-1, heads)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]


class Olmo2Block(nn.Module):
    """Attention and feed-forward; what each adds to the residual stream is normalized."""

    def __init__(self, sizes: Olmo2Sizes):
        super().__init__()
        self.attention = Olmo2Attention(sizes)
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention_norm(self.attention(x, rope, documents, cache))
        return x + self.ffn_norm(self.feed_forward(x))


class Olmo2(RotaryDecoder):
    """The transformer of OLMo 2."""

    def __init__(self, sizes: Olmo2Sizes):
        super().__init__(sizes, lambda index: Olmo2Block(sizes))
