"""Rotary position embedding (https://arxiv.org/abs/2104.09864) with Llama 3.1's scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's extension of a trained context: divides low frequencies by `factor`."""

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192  # tokens


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position, [K/2], fp32 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    unscaled = theta**-exponents
    if scaling is None:
        return unscaled
    turns = scaling.original_context * unscaled / (2 * math.pi)  # over the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided by `factor`, 1: unchanged
    return unscaled * (blend + (1 - blend) / scaling.factor)


@cache  # every forward needs it, and at a copy from pageable memory the host waits for the GPU
def _cached_frequencies(
    device: torch.device, head_dim: int, theta: float, scaling: RopeScaling | None
) -> Tensor:
    return rope_frequencies(head_dim, theta, scaling).to(device)


def rope_cos_sin(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine at `positions` [T] or [B, T], each [..., T, 1, K] in fp32.

    Every forward computes them, in less than a thousandth of its time. A precomputed table would
    have to be sliced for sequence, context and pipeline parallelism.
    """
    frequencies = _cached_frequencies(positions.device, head_dim, theta, scaling)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, T, H, K] by its positions; pairs are (i, i + K/2), as in Hugging Face."""
    cosine, sine = rope
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x * cosine + rotated * sine).to(x.dtype)
