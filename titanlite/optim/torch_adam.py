"""torch's fused Adam and AdamW, with a step that a flag on the device applies or skips."""

from __future__ import annotations

import torch
from torch import Tensor


class _FusedConditional(torch.optim.Optimizer):
    """Mixin for fused optimizers, whose kernels write nothing if `found_inf` is 1."""

    found_inf: Tensor  # torch's GradScaler sets it; the fused step changes nothing if it is 1

    def step_if(self, accept: Tensor) -> None:
        """See `ConditionalOptimizer.step_if`."""
        self.found_inf = (~accept).float()
        try:
            self.step()
        finally:
            del self.found_inf

    def uncount_steps(self, steps: int) -> None:
        """Nothing to do: torch's fused step counts on the device, and only steps that it takes."""


class ConditionalAdamW(_FusedConditional, torch.optim.AdamW):
    """torch's AdamW; requires `fused=True`."""


class ConditionalAdam(_FusedConditional, torch.optim.Adam):
    """torch's Adam; requires `fused=True`."""
