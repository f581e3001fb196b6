"""Parameters and FLOPs of a model, counted from its modules on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention
from titanlite.kernels.delta_rule import DeltaRule, ShortConvolution
from titanlite.models.moe import MixtureOfExperts


class BlockCounts(NamedTuple):
    """What one block computes for a token."""

    weights: int  # matmul weights that a token is multiplied with
    window: int  # tokens that it attends to, itself included; 0: all up to itself
    state: int = 0  # elements of the states of linear attention, which then replaces attention


class ModelCounts(NamedTuple):
    """What a model consists of."""

    parameters: int  # tied embeddings count once
    blocks: tuple[BlockCounts, ...]
    has_positions: bool  # a learned position embedding


@lru_cache(maxsize=64)
def count_model(build: Callable[[Any], nn.Module], sizes: Any, blocks_path: str) -> ModelCounts:
    """Count the modules that `build` makes of `sizes`; raises ConfigError if they are too large."""
    try:
        with torch.device("meta"):
            model = build(sizes)
    except (RuntimeError, TypeError, OverflowError) as error:  # a size or the bytes: over 64 bits
        raise ConfigError(
            f"[model]: the parameters of {sizes!r:.200} are too many: {error!s:.200}.",
            fix="Use smaller sizes.",
        ) from None
    return ModelCounts(
        sum(parameter.numel() for parameter in model.parameters()),
        tuple(_count_block(block) for block in model.get_submodule(blocks_path).children()),
        getattr(model, "pos_embeddings", None) is not None,
    )


def _count_block(block: nn.Module) -> BlockCounts:
    weights = window = state = 0
    for module in block.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
        elif isinstance(module, MixtureOfExperts):  # besides its linear layers
            stacks = module.experts.parameters()
            numel = sum(stack.numel() for stack in stacks if stack.shape[-1] > 1)  # not biases
            weights += numel * module.sizes.active // module.sizes.count
        elif isinstance(module, CausalAttention):
            window = module.window
        elif isinstance(module, ShortConvolution):
            weights += sum(weight.numel() for weight in module.parameters())
        elif isinstance(module, DeltaRule):
            state = module.state_size
    return BlockCounts(weights, window, state)


def flops_of_block(block: BlockCounts, sizes: Any, seq_len: int, full_attention: bool) -> float:
    """Forward and backward FLOPs per token of one block: 6 per matmul weight, plus attention.

    Attention costs 6 H (K + V) T counted in full, where K and V are the features of a head's key
    and value: 12 H K T where they are equal (PaLM, https://arxiv.org/abs/2204.02311, appendix B).
    Counted causally, it is half of that. `full_attention`: as if a token also attended to later
    ones. Linear attention costs 18 per element of its states, as computed token by token: a matmul
    each to read what a key maps to, to write, and to read for a query.
    """
    if block.state:
        return 6 * block.weights + 18 * block.state
    key_dim = sizes.head_width
    features = sizes.n_heads * (key_dim + getattr(sizes, "v_head_dim", key_dim))
    attended: float = min(block.window or seq_len, seq_len)
    if not full_attention:
        attended = attended * (1 - attended / (2 * seq_len)) if seq_len else 0.0
    return 6 * block.weights + 6 * features * attended
