"""Qwen3's dense models (https://arxiv.org/abs/2505.09388): Llama's blocks with a norm on each
query and key head, and heads whose width does not follow from the model's."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.decoder import RotaryDecoder
from titanlite.models.llama3.model import TransformerBlock


@dataclass(frozen=True)
class Qwen3Sizes:
    """The sizes of one Qwen3 model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
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


class Qwen3(RotaryDecoder):
    """The transformer of Qwen3."""

    def __init__(self, sizes: Qwen3Sizes):
        super().__init__(sizes, lambda index: TransformerBlock(sizes))
