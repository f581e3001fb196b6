"""torch's fused Adam and AdamW, with a step that is decided on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class _FusedConditional(torch.optim.Optimizer):
    """Mixin for fused optimizers, whose kernels write nothing if `found_inf` is 1."""

    found_inf: Tensor  # read by torch's fused optimizers, for torch.amp.GradScaler

    def step_if(self, accept: Tensor) -> None:
        """See `ConditionalOptimizer.step_if`."""
        self.found_inf = (~accept).float()
        try:
            self.step()
        finally:
            del self.found_inf

    def uncount_steps(self, steps: int) -> None:
        """The kernel counts steps on the device, and not those that it skips."""


class ConditionalAdamW(_FusedConditional, torch.optim.AdamW):
    """torch's AdamW, for fused = true only."""


class ConditionalAdam(_FusedConditional, torch.optim.Adam):
    """torch's Adam, for fused = true only."""
