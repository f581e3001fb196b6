"""Read MXFP4, in which gpt-oss stores its experts.

32 values of 4 bits (E2M1) share a power of two (E8M0): OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MXFP4, MXFP4_BLOCK = "MXFP4", 32
# By the bits of the exponent and the mantissa; the highest of four bits is the sign
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127


class Mxfp4Slice:
    """Stacked matrices [E, K, N] in MXFP4; as a slice of safetensors, it reads what is indexed.

    `blocks` [E, N, K / 32, 16] has two values a byte, the first in the lower bits; `scales` is
    [E, N, K / 32].
    """

    def __init__(self, blocks: Any, scales: Any):
        self.blocks, self.scales = blocks, scales

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Tensor:
        """The values in bfloat16, which has all of them."""
        experts, inputs, outputs = index
        first, end = inputs.start // MXFP4_BLOCK, -(-inputs.stop // MXFP4_BLOCK)
        packed = self.blocks[experts, outputs, first:end]
        scales = self.scales[experts, outputs, first:end]
        table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)  # [E, N, K / 32, 32]
        exponents = scales.int().unsqueeze(-1) - SCALE_BIAS
        values = torch.ldexp(table[codes.int()], exponents).to(torch.bfloat16).flatten(-2)
        skipped = first * MXFP4_BLOCK
        return values[..., inputs.start - skipped : inputs.stop - skipped].mT
