"""What a decoder-only transformer consists of, as plain numbers.

A model family describes itself by a `ModelShape`. Its parameters and FLOPs are counted from it
(`counts.py`), and so are the memory and the time of a training step (`planning`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a block."""

    count: int
    active: int  # experts that each token is sent to
    hidden_dim: int
    shared_hidden_dim: int = 0  # width of all shared experts together, which every token uses
    dense_layers: int = 0  # blocks at the start that have a feed-forward layer instead


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1).

    Keys and values of all heads are projected from one narrow vector per token. A head has
    `head_dim` query and key features, of which the last `rotary_dim` are rotated; those of the key
    are shared by all heads.
    """

    query_rank: int  # width from which queries are projected; 0: from the hidden states
    key_value_rank: int  # width from which keys and values are projected
    rotary_dim: int
    value_dim: int  # features of a head's value


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

    name: str
    n_layers: int
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int  # of the feed-forward layer
    vocab_size: int
    gated: bool = True  # three matmuls in the feed-forward layer (SwiGLU), otherwise two
    tied_embeddings: bool = False
    positions: int = 0  # rows of a learned position embedding
    biases: bool | Literal["qkv"] = False
    # all linear layers and norms have biases, or only the queries, keys and values
    qk_norm: bool | Literal["projections"] = False
    # a norm on every query and key head, or one on the queries (keys) of all heads together
    experts: Experts | None = None
    norms_per_block: int = 2
    window: int = 0  # tokens that a token attends to, itself included; 0: all up to itself
    full_attention_every: int = 0  # with a window, every k-th block has none; 0: all have it
    latent: LatentAttention | None = None

    def has_experts(self, block: int) -> bool:
        """Whether block number `block` has experts instead of a feed-forward layer."""
        return self.experts is not None and block >= self.experts.dense_layers

    def window_of(self, block: int) -> int:
        """The window of block number `block`; 0: none."""
        every = self.full_attention_every
        return 0 if every and (block + 1) % every == 0 else self.window

    @property
    def value_dim(self) -> int:
        """Features of a head's value."""
        return self.latent.value_dim if self.latent else self.head_dim
