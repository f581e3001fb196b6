"""What a decoder-only transformer consists of, as plain numbers, and what is counted from them.

The planner reads it from a model's spec (`shape_of`), or from a table of published models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.delta_rule import DeltaRule
from titanlite.models import ExpertSizes, MixtureOfExperts, ModelSizes, ModelSpec
from titanlite.models.sizes import prediction_layers


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a block."""

    count: int
    active: int  # experts that each token is sent to
    hidden_dim: int
    shared_hidden_dim: int = 0  # width of all shared experts together, which every token uses
    dense_layers: int = 0  # blocks at the start that have a feed-forward layer instead
    clamped: bool = False  # the activation is gpt-oss's


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
    biases: bool | Literal["qkv", "linear"] = False
    # all linear layers and norms have biases, or only the queries, keys and values, or all linear
    # layers of a block
    sinks: bool = False  # a number for each query head
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


def shape_of(spec: ModelSpec[Any], sizes: ModelSizes) -> ModelShape:
    """The shape of a model of a family, read from its modules on the meta device."""
    if layers := prediction_layers(sizes):
        raise ConfigError(
            f"model.mtp_layers = {layers}: the planner does not know multi-token prediction: it"
            " cannot estimate the memory or the time of this model.",
            fix="Set model.mtp_layers = 0 to plan without it, or start a short job, which logs"
            " both.",
        )
    facts = _read_modules(spec.build, spec.blocks_path, spec.experts(sizes), sizes)  # type: ignore[arg-type]
    return replace(facts, name=spec.name, tied_embeddings=bool(spec.tied_parameters(sizes)))


def _check_is_known(model: nn.Module) -> None:
    if any(isinstance(module, DeltaRule) for module in model.modules()):
        raise ConfigError(
            "the planner has no formulas for linear attention: it cannot estimate the memory or the"
            " time of this model.",
            fix="For the memory of one layout, use python -m titanlite_planner dry-run; a short job"
            " logs both.",
        )


@lru_cache(maxsize=64)
def _read_modules(
    build: Callable[[Any], nn.Module], blocks_path: str, experts: ExpertSizes | None, sizes: Any
) -> ModelShape:
    with torch.device("meta"):
        model = build(sizes)
    _check_is_known(model)
    blocks = list(model.get_submodule(blocks_path).children())
    parameters = dict(blocks[-1].named_parameters())
    windows = [m.window for m in blocks[0].modules() if isinstance(m, CausalAttention)]
    norms = sum(name.endswith("norm.weight") for name in parameters if name.count(".") == 1)
    positions = getattr(model, "pos_embeddings", None)
    latent, mixture, q_norm = None, None, parameters.get("attention.q_norm.weight")
    if rank := getattr(sizes, "kv_lora_rank", 0):
        query_rank, rotary_dim = sizes.q_lora_rank, sizes.qk_rope_head_dim
        latent = LatentAttention(query_rank, rank, rotary_dim, sizes.v_head_dim)
        q_norm = None  # counted with the rank
    if experts is not None:
        dense = [b for b in blocks if not any(isinstance(m, MixtureOfExperts) for m in b.modules())]
        widths = experts.hidden_dim, experts.shared_dim
        mixture = Experts(experts.count, experts.active, *widths, len(dense), experts.clamped)
    has_biases = any(name.endswith("norm.bias") for name in parameters)
    return ModelShape(
        name="",
        n_layers=sizes.n_layers,
        dim=sizes.dim,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_width,
        hidden_dim=sizes.hidden_dim,
        vocab_size=sizes.vocab_size,
        gated=any(".w3" in name for name in parameters),
        positions=0 if positions is None else next(positions.parameters()).shape[0],
        biases=(
            True
            if has_biases
            else "linear"
            if "attention.wo.bias" in parameters
            else "qkv"
            if "attention.wq.bias" in parameters
            else False
        ),
        sinks="attention.attend.sinks.weight" in parameters,
        qk_norm=(
            False
            if q_norm is None
            else True
            if q_norm.numel() == sizes.head_width
            else "projections"
        ),
        experts=mixture,
        norms_per_block=norms,
        window=windows[0],
        full_attention_every=getattr(sizes, "full_attention_every", 0),
        latent=latent,
    )


def attention_weights(shape: ModelShape) -> int:
    """Matmul weights of a block's attention."""
    queries = shape.n_heads * shape.head_dim
    out = shape.n_heads * shape.value_dim * shape.dim
    if (latent := shape.latent) is None:
        return shape.dim * (queries + 2 * shape.n_kv_heads * shape.head_dim) + out
    rank = latent.query_rank
    to_queries = (shape.dim + queries) * rank if rank else shape.dim * queries
    to_latent = shape.dim * (latent.key_value_rank + latent.rotary_dim)
    unrotated = shape.head_dim - latent.rotary_dim
    to_heads = latent.key_value_rank * shape.n_heads * (unrotated + latent.value_dim)
    return to_queries + to_latent + to_heads + out


def feed_forward_weights(shape: ModelShape, hidden_dim: int) -> int:
    """Matmul weights of a feed-forward layer, or of an expert."""
    return (3 if shape.gated else 2) * shape.dim * hidden_dim


def block_matmul_weights(shape: ModelShape, block: int, active_only: bool = False) -> int:
    """Matmul weights of one block; `active_only`: only those that a token is multiplied with."""
    weights = attention_weights(shape)
    if not shape.has_experts(block):
        return weights + feed_forward_weights(shape, shape.hidden_dim)
    experts = shape.experts
    assert experts is not None
    count = experts.active if active_only else experts.count
    width = count * experts.hidden_dim + experts.shared_hidden_dim
    router = shape.dim * experts.count
    return weights + router + feed_forward_weights(shape, width)


def _block_vectors(shape: ModelShape, block: int) -> int:
    """Elements of a block's norms and biases."""
    norms = shape.norms_per_block * shape.dim * (2 if shape.biases is True else 1)
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    if shape.qk_norm == "projections":
        norms += queries + keys
    elif shape.qk_norm:
        norms += 2 * shape.head_dim
    if shape.latent:
        norms += shape.latent.query_rank + shape.latent.key_value_rank
    if shape.biases:
        norms += queries + 2 * keys
    if shape.sinks:
        norms += shape.n_heads
    if shape.biases not in (True, "linear"):
        return norms
    norms += shape.dim  # of the projection behind attention
    if not shape.has_experts(block):
        return norms + feed_forward_biases(shape, shape.hidden_dim)
    experts = shape.experts
    assert experts is not None
    biases = experts.count * feed_forward_biases(shape, experts.hidden_dim)
    return norms + biases + experts.count  # the last of the router


def feed_forward_biases(shape: ModelShape, hidden_dim: int) -> int:
    """Elements of the biases of a feed-forward layer, or of an expert."""
    return hidden_dim * (2 if shape.gated else 1) + shape.dim


def count_block_parameters(shape: ModelShape, block: int) -> int:
    """Parameters of block number `block`."""
    return block_matmul_weights(shape, block) + _block_vectors(shape, block)


def count_blocks(shape: ModelShape) -> int:
    """Parameters of all blocks; in constant time, as a file may describe any number of them."""
    dense = min(shape.experts.dense_layers, shape.n_layers) if shape.experts else shape.n_layers
    with_experts = shape.n_layers - dense
    total = dense * count_block_parameters(shape, 0) if dense else 0
    return total + (with_experts * count_block_parameters(shape, dense) if with_experts else 0)


def count_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    rows = (1 if shape.tied_embeddings else 2) * shape.vocab_size + shape.positions
    norm = 2 if shape.biases is True else 1
    return count_blocks(shape) + (rows + norm) * shape.dim


def count_active_parameters(shape: ModelShape) -> int:
    """Parameters that one token uses: all but those of experts that it is not routed to."""
    blocks = range(shape.n_layers)
    idle = sum(
        block_matmul_weights(shape, block) - block_matmul_weights(shape, block, active_only=True)
        for block in blocks
    )
    if shape.experts and shape.biases in (True, "linear"):
        experts, with_experts = shape.experts, sum(map(shape.has_experts, blocks))
        unused = experts.count - experts.active
        idle += with_experts * unused * feed_forward_biases(shape, experts.hidden_dim)
    return count_parameters(shape) - idle


def _attended(shape: ModelShape, block: int, seq_len: int, full: bool) -> float:
    """Mean number of tokens that a token attends to; `full`: as if also to later ones."""
    window = min(shape.window_of(block) or seq_len, seq_len)
    return window if full else window * (1 - window / (2 * seq_len)) if seq_len else 0.0


def block_flops(shape: ModelShape, block: int, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs per token of one block: 6 per matmul weight, plus attention.

    Attention costs 6 H (K + V) T counted in full, where K and V are the features of a head's key
    and value: 12 H K T where they are equal (PaLM, https://arxiv.org/abs/2204.02311, appendix B).
    Counted causally, it is half of that.
    """
    features = shape.n_heads * (shape.head_dim + shape.value_dim)
    attention = 6 * features * _attended(shape, block, seq_len, full_attention)
    return 6 * block_matmul_weights(shape, block, active_only=True) + attention


def flops_per_token(shape: ModelShape, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs per token of the model."""
    blocks = (block_flops(shape, b, seq_len, full_attention) for b in range(shape.n_layers))
    return sum(blocks) + 6 * shape.vocab_size * shape.dim
