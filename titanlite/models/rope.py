"""Rotary position embedding (https://arxiv.org/abs/2104.09864) with scaling for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Extension of a trained context that divides all frequencies by `factor`."""

    factor: float

    rotary_factor = 1.0

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Radians per position [K/2] for the longer context."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's extension of a trained context: divides low frequencies by `factor`."""

    rotary_factor = 1.0

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192  # tokens

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Radians per position [K/2] for the longer context."""
        turns = self.original_context * frequencies / (2 * math.pi)  # over the original context
        low, high = self.low_frequency_factor, self.high_frequency_factor
        blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divided by `factor`, 1: unchanged
        return frequencies * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2); defaults as in DeepSeek-V3.

    Pairs that turn at least `fast_turns` times over the original context are unchanged, those that
    turn at most `slow_turns` times are divided by `factor`, with a linear blend between.
    """

    factor: float = 40.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    original_context: int = 4096  # tokens
    rotary_factor: float = 1.0  # of cosines and sines; DeepSeek-V3 multiplies scores instead
    truncate: bool = True  # the blend begins and ends at whole pairs

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """Radians per position [K/2] for the longer context."""
        pairs = len(frequencies)

        def pair_with(turns: float) -> float:
            """Index of the pair that turns so often over the original context."""
            ratio = self.original_context / (turns * 2 * math.pi)
            return pairs * math.log(ratio) / math.log(theta)

        first, last = pair_with(self.fast_turns), pair_with(self.slow_turns)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        index = torch.arange(pairs, dtype=torch.float32, device="cpu")
        divided = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies * (1 - divided) + frequencies / self.factor * divided

    @property
    def score_factor(self) -> float:
        """What attention scores are multiplied by (section 3.4), as DeepSeek-V3 does."""
        return yarn_factor(self.factor) ** 2


def yarn_factor(factor: float) -> float:
    """What YaRN multiplies queries and keys by (section 3.4); `factor`: of the context."""
    return 0.1 * math.log(factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@cache  # every forward needs it, and at a copy from pageable memory the host waits for the GPU
def rope_frequencies(
    device: torch.device, head_dim: int, theta: float, scaling: RopeScaling | None
) -> Tensor:
    """Radians per position, [K/2] in fp32; computed on the CPU, to be the same on every device."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    unscaled = theta**-exponents
    return (unscaled if scaling is None else scaling.scale(unscaled, theta)).to(device)


def rope_cos_sin(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosine and sine at `positions` [T] or [B, T], each [..., T, 1, K] in fp32.

    Every forward computes them, in less than a thousandth of its time. A precomputed table would
    have to be sliced for sequence, context and pipeline parallelism.
    """
    frequencies = rope_frequencies(positions.device, head_dim, theta, scaling)
    angles = positions.unsqueeze(-1).float() * frequencies
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
    if scaling is None or scaling.rotary_factor == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * scaling.rotary_factor, angles.sin() * scaling.rotary_factor


def apply_rope(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [B, T, H, K] by its positions; pairs are (i, i + K/2), as in Hugging Face.

    If `rope` has fewer features than a head, the first ones are rotated.
    """
    cosine, sine = rope
    if (width := cosine.shape[-1]) < x.shape[-1]:
        return torch.cat([apply_rope(x[..., :width], rope), x[..., width:]], dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([-second, first], dim=-1)
    return (x * cosine + rotated * sine).to(x.dtype)


def pair_halves(x: Tensor) -> Tensor:
    """Reorder features from the pairs (2i, 2i + 1) to the pairs (i, i + K/2) of `apply_rope`.

    Scores do not change, because queries and keys are reordered alike.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
