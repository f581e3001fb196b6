"""Qwen3's models with experts (https://arxiv.org/abs/2505.09388): Mixtral's blocks with a norm on
each query and key head, and many narrow experts."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.decoder import RotaryDecoder
from titanlite.models.mixtral.model import ExpertBlock
from titanlite.models.router import ExpertSizes


@dataclass(frozen=True)
class Qwen3MoESizes:
    """The sizes of one model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    expert_hidden_dim: int
    n_experts: int = 128
    n_active_experts: int = 8
    vocab_size: int = 151_936
    head_dim: int = 128
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tied_embeddings: bool = False

    rope_scaling = None
    qk_norm = True

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.head_dim

    @property
    def hidden_dim(self) -> int:
        """Width of a feed-forward layer: of an expert."""
        return self.expert_hidden_dim

    @property
    def experts(self) -> ExpertSizes:
        return ExpertSizes(self.n_experts, self.n_active_experts, self.expert_hidden_dim)


class Qwen3MoE(RotaryDecoder):
    """The transformer of Qwen3 30B-A3B and 235B-A22B."""

    def __init__(self, sizes: Qwen3MoESizes):
        super().__init__(sizes, lambda index: ExpertBlock(sizes))
