"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama's blocks with a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.models.decoder import RotaryDecoder
from titanlite.models.llama3.model import Attention, TransformerBlock


@dataclass(frozen=True)
class MistralSizes:
    """The sizes of one Mistral model; their meanings are those of the keys in `ModelConfig`."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 32_768
    head_dim: int = 0  # 0: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    window: int = 0

    rope_scaling = None
    qk_norm = tied_embeddings = False

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.head_dim or self.dim // self.n_heads


class Mistral(RotaryDecoder):
    """The transformer of Mistral 7B."""

    def __init__(self, sizes: MistralSizes):
        super().__init__(
            sizes, lambda index: TransformerBlock(sizes, Attention(sizes, sizes.window))
        )
