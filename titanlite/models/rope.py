"""Rotary position embedding (https://arxiv.org/abs/2104.09864), with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches a trained context: long wavelengths by `factor`, short ones not."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192  # tokens


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians a position, [K/2], fp32 on the CPU: a constant of the architecture."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = theta**-exponents
    if scaling is None:
        return plain
    turns = scaling.original_context * plain / (2 * math.pi)  # in the context it was trained on
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: stretched, 1: as it was
    return plain * (kept + (1 - kept) / scaling.factor)


@cache  # a GPU waits for what comes from pageable memory, and this is needed in every forward
def _frequencies_on(device: torch.device, *architecture) -> Tensor:
    return rope_frequencies(*architecture).to(device)


def rope_cos_sin(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine at `positions` [T] or [B, T], each [..., T, 1, K] in fp32.

    Computed anew in every forward: it costs less than a thousandth of one, and there is no table
    to slice wrongly under sequence, context or pipeline parallelism.
    """
    steps = _frequencies_on(positions.device, head_dim, theta, scaling)
    angles = positions.unsqueeze(-1).float() * steps
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [B, T, H, K] by its positions; pairs are (i, i + K/2), as Hugging Face stores them."""
    cosine, sine = rope
    left, right = x.float().chunk(2, dim=-1)
    x_turned = torch.cat([-right, left], dim=-1)
    return (x * cosine + x_turned * sine).to(x.dtype)
