"""OLMo 2 (https://arxiv.org/abs/2501.00656, section 3.1): norms behind attention and feed-forward,
and norms of the queries and of the keys of all heads together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from titanlite.kernels.attention import KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Rope, RotaryDecoder
from titanlite.models.llama3.model import Attention, FeedForward


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


class Olmo2Attention(Attention):
    """Llama's attention with one norm of all queries, and one of all keys."""

    def __init__(self, sizes: Olmo2Sizes):
        super().__init__(sizes)
        self.q_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.k_norm = nn.RMSNorm(sizes.n_kv_heads * self.head_width, eps=sizes.norm_eps)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = (-1, self.head_width)
        q = self.q_norm(self.wq(x)).unflatten(-1, heads)
        return q, self.k_norm(self.wk(x)).unflatten(-1, heads)


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
