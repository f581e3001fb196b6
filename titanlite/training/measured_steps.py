"""Periodic actions for meters that measure inside of a step, in every N-th step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from titanlite.training.periodic import PeriodicAction, StepInfo


class StepMeter(Protocol):
    """A meter that is armed before a step, and measures while the step runs."""

    def arm(self) -> None:
        """Measure the next step."""

    def take(self) -> Any:
        """Return what was measured since `arm`, and forget it; disarms the meter."""


def measure_steps(
    name: str, freq: int, step: int, meter: StepMeter, record: Callable[[StepInfo], None]
) -> PeriodicAction:
    """Arm `meter` before every `freq`-th step, and call `record` after it.

    `step`: steps taken so far. `record` calls `meter.take`.
    """

    def arm_if_next(step: int) -> None:
        if (step + 1) % freq == 0:
            meter.arm()

    def start_again(step: int) -> None:
        meter.take()  # discard what it measured in a step that was rolled back
        arm_if_next(step)

    def run(info: StepInfo) -> None:
        if info.step % freq == 0:
            record(info)
        arm_if_next(info.step)

    def is_due(info: StepInfo) -> bool:
        return info.step % freq == 0 or (info.step + 1) % freq == 0

    arm_if_next(step)
    return PeriodicAction(name, is_due, run, needs_accepted=True, start_again=start_again)
