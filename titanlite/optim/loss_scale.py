"""The loss scale of float16, whose gradients are too small for it unless they are made larger.

https://arxiv.org/abs/1710.03740: as large as it may be, halved by every step that overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class LossScaleConfig:
    """[loss_scale] What the loss is multiplied by in float16, before backward."""

    initial: Annotated[float, Range(1)] = 65_536.0  # at the first step
    growth_steps: Positive = 2000  # doubled after so many steps in a row without an overflow


@dataclass
class LossScale:
    """The scale now, and how long it has held."""

    value: float
    growth_steps: int
    held_steps: int = 0

    def update(self, finite: bool) -> None:
        """Follow one step."""
        self.held_steps = self.held_steps + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self.held_steps >= self.growth_steps:  # more, where a resumed run wants fewer
            self.value, self.held_steps = self.value * 2, 0

    @property
    def exhausted(self) -> bool:
        """Whether gradients overflowed though the loss was not scaled up any more."""
        return self.value < 1

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "held_steps": self.held_steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.value, self.held_steps = state["value"], state["held_steps"]
