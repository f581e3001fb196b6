"""Mixtral (https://arxiv.org/abs/2401.04088): Mistral's blocks with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from titanlite.kernels.attention import KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models.decoder import Rope, RotaryDecoder
from titanlite.models.llama3.model import Attention, LlamaBlockSizes
from titanlite.models.moe import MixtureOfExperts
from titanlite.models.router import ExpertSizes


@dataclass(frozen=True)
class MixtralSizes:
    """The sizes of one Mixtral model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    expert_hidden_dim: int
    n_experts: int = 8
    n_active_experts: int = 2
    vocab_size: int = 32_000
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    tied_embeddings: bool = False

    rope_scaling = None
    qk_norm = False

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Width of a feed-forward layer: of an expert."""
        return self.expert_hidden_dim

    @property
    def experts(self) -> ExpertSizes:
        return ExpertSizes(self.n_experts, self.n_active_experts, self.expert_hidden_dim)


class ExpertBlockSizes(LlamaBlockSizes, Protocol):
    """The sizes that `ExpertBlock` reads; the size classes of several families have them."""

    @property
    def experts(self) -> ExpertSizes:
        """The experts of each block."""


class ExpertBlock(nn.Module):
    """Attention and a mixture of experts, each behind an RMSNorm and added to the residual.

    `attention`: None for Llama's.
    """

    def __init__(self, sizes: ExpertBlockSizes, attention: nn.Module | None = None):
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = attention or Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.moe = MixtureOfExperts(sizes.dim, sizes.experts)

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents, cache)
        return x + self.moe(self.ffn_norm(x))


class Mixtral(RotaryDecoder):
    """The transformer of Mixtral 8x7B and 8x22B."""

    def __init__(self, sizes: MixtralSizes):
        super().__init__(sizes, lambda index: ExpertBlock(sizes))
