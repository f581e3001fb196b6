"""[guard], and what the guard decides from its history and what was observed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Literal

from titanlite.errors import ConfigError
from titanlite.settings import Positive, Range

MIN_WINDOW_STEPS = 16  # accepted steps before a value can be a spike


@dataclass(frozen=True)
class GuardConfig:
    """[guard] What to do with a step whose loss or gradient norm is inf, NaN or a spike."""

    nonfinite: Literal["off", "skip", "rollback"] = "skip"
    # inf or NaN in the loss or the gradient; skip: continue after the batch of that step, without
    # an update; rollback: continue from an earlier checkpoint
    spike: Literal["off", "warn", "skip", "rollback"] = "off"
    # a loss or gradient norm far above those of the last accepted steps; warn: only write an event
    threshold: Annotated[float, Range(1)] = 6.0
    # a spike is above the median of the window by more than this number of standard deviations, of
    # the logarithm; the deviation is estimated from the differences of consecutive steps
    window_steps: Annotated[int, Range(MIN_WINDOW_STEPS)] = 128
    # number of accepted steps in the window; values are judged from 16 on
    max_violations: Positive = 5
    # violating steps in a row after which the run ends with exit code 3; 1: at the first, without a
    # roll-back
    max_hardware_faults: Positive = 3
    # hardware faults of one host after which the run ends with exit code 3; a fault: the replay of
    # a violating step has other bits

    rollback_steps: Positive = 100
    # the window of the first roll-back: as many steps before and after the violating step; twice as
    # many for each further roll-back for the same trouble
    rollback_lr_factor: Annotated[float, Range(0, 0.99)] = 0.0
    # 0: skip the samples of the window; otherwise train on them, with the learning rate multiplied
    # by this once for each roll-back for the same trouble
    rollback_tries: Annotated[int, Range(1, 10)] = 3
    # roll-backs for the same trouble, after which the run ends with exit code 3

    def __str__(self) -> str:
        actions = {"warn": "event only", "skip": "skip the step", "rollback": "roll back"}
        nonfinite, spikes = (actions.get(p, "not checked") for p in (self.nonfinite, self.spike))
        return f"inf and NaN: {nonfinite}; spikes: {spikes}"


def check_guard_config(config: GuardConfig, in_backward: bool) -> Iterator[ConfigError]:
    """Reject policies that contradict each other or an update in backward.

    `in_backward`: optimizer.early_step_in_backward.
    """
    if config.spike != "off" and config.nonfinite == "off":
        yield ConfigError(
            f'guard.spike = "{config.spike}": guard.nonfinite = "off", but a run that is checked'
            " for spikes must be checked for inf and NaN, too.",
            fix='Set guard.nonfinite = "skip", or guard.spike = "off".',
        )
    if "rollback" in (config.nonfinite, config.spike) and config.max_violations == 1:
        yield ConfigError(
            "guard.max_violations = 1: the run would end at the first violation, and never roll"
            " back.",
            fix='Set guard.max_violations = 2 or more, or use "skip" instead of "rollback".',
        )
    if in_backward and config.spike != "off":
        yield ConfigError(
            f'guard.spike = "{config.spike}": optimizer.early_step_in_backward = true updates the'
            " parameters before the loss and the gradient norm are known, so a spike would end the"
            " run.",
            fix='Set guard.spike = "off", or optimizer.early_step_in_backward = false.',
        )


class ViolationReason(Enum):
    """Why a step is a violation."""

    NONFINITE = "inf or NaN"
    SPIKE = "spike"


class StepVerdict(Enum):
    """What happens to a violating step. The values are the names of events in metrics.jsonl."""

    ACCEPT = "spike"  # update the parameters with the replayed gradients
    SKIP = "step_skipped"  # change no parameter and no optimizer state; the position advances
    ROLL_BACK = "violation"  # continue from an earlier checkpoint, which is another event
    GIVE_UP = "diverged"  # end the run with exit code 3


@dataclass
class History:
    """What earlier violations leave behind; saved in checkpoints."""

    last_step: int = 0  # the last violating step that the data or the optimization caused
    in_a_row: int = 0  # how many such steps there are in a row, up to `last_step`
    hardware_faults: dict[str, int] = field(default_factory=dict)  # by host

    def decide(
        self,
        step: int,
        reason: ViolationReason | None,
        faulty_host: str | None,
        config: GuardConfig,
    ) -> StepVerdict:
        """What to do with a violating step, counted from 1, that was replayed; remembers it.

        `reason`: why the replay is a violation, too; None if it is not. `faulty_host` computed
        other bits than in the replay: the hardware is a cause, and the only one if there is no
        `reason`. None if the bits are the same: the data or the optimization is the cause.
        """
        if faulty_host is not None:
            count = self.hardware_faults.get(faulty_host, 0) + 1
            self.hardware_faults[faulty_host] = count
            if count >= config.max_hardware_faults:
                return StepVerdict.GIVE_UP
        policy = config.spike if reason is ViolationReason.SPIKE else config.nonfinite
        if reason is None or policy == "warn":
            return StepVerdict.ACCEPT
        self.in_a_row = self.in_a_row + 1 if step == self.last_step + 1 else 1
        self.last_step = step
        if self.in_a_row >= config.max_violations:
            return StepVerdict.GIVE_UP
        return StepVerdict.ROLL_BACK if policy == "rollback" else StepVerdict.SKIP
