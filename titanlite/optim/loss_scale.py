"""Dynamic loss scaling for float16, in which unscaled gradients would underflow.

https://arxiv.org/abs/1710.03740: the scale grows periodically and is halved by every overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class LossScaleConfig:
    """[loss_scale] The factor that multiplies a float16 loss before backward."""

    initial: Annotated[float, Range(1)] = 65_536.0  # loss scale at the first step
    growth_steps: Positive = 2000  # consecutive steps without overflow after which it doubles


@dataclass
class LossScale:
    """The current loss scale, and how many steps it has lasted without an overflow."""

    value: float
    growth_steps: int
    held_steps: int = 0

    def __post_init__(self) -> None:
        self._initial = self.state()

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step whose gradients were finite or not."""
        self.held_steps = self.held_steps + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, min(self.value, 1.0))
        elif self.held_steps >= self.growth_steps:  # greater if a resumed run lowered growth_steps
            self.value, self.held_steps = self.value * 2, 0

    @property
    def shrinkable(self) -> bool:
        """Whether half of the scale is at least 1; if not, the gradients overflow by themselves."""
        return self.value / 2 >= 1

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "held_steps": self.held_steps}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned; None: the state at the start."""
        state = self._initial if state is None else state
        self.value, self.held_steps = state["value"], state["held_steps"]
