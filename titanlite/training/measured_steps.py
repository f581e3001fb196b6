"""Measurements that a step makes itself, in every N-th step."""

from __future__ import annotations

from collections.abc import Callable

from titanlite.training.periodic import PeriodicAction, StepInfo


def measure_steps(
    name: str, freq: int, step: int, arm: Callable[[], None], record: Callable[[StepInfo], None]
) -> PeriodicAction:
    """Call `arm` before every `freq`-th step, and `record` after it; `step` steps are taken."""

    def arm_if_next(step: int) -> None:
        if (step + 1) % freq == 0:
            arm()

    def run(info: StepInfo) -> None:
        if info.step % freq == 0:
            record(info)
        arm_if_next(info.step)

    def is_due(info: StepInfo) -> bool:
        return info.step % freq == 0 or (info.step + 1) % freq == 0

    arm_if_next(step)
    return PeriodicAction(name, is_due, run, needs_accepted=True)
