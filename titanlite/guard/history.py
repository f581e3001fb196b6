"""What the guard decides, as a pure function of its history and of what was observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from titanlite.guard.config import GuardConfig


class ViolationReason(Enum):
    """Why a step is a violation."""

    NONFINITE = "inf or NaN"
    SPIKE = "spike"


class ReplayResult(Enum):
    """How the replay of a violating step compares with its first computation."""

    SAME = "the same bits on every rank"  # the data or the optimization is the cause
    NORMAL = "other bits, and no violation"  # the hardware is the cause
    VIOLATING = "other bits, and a violation again"  # both


class StepVerdict(Enum):
    """What happens to a violating step."""

    ACCEPT = "accept"  # update the parameters with the replayed gradients
    SKIP = "skip"  # change no parameter and no optimizer state; the position advances
    ROLL_BACK = "roll back"  # continue from an earlier checkpoint
    GIVE_UP = "give up"  # end the run with exit code 3


@dataclass(frozen=True)
class Observation:
    """A violating step that was replayed; the same on all ranks."""

    step: int  # counted from 1
    reason: ViolationReason
    replay: ReplayResult
    host: str = ""  # of the rank that computed other bits


@dataclass(frozen=True)
class History:
    """What earlier violations leave behind; saved in checkpoints."""

    last_step: int = 0  # the last violating step that the data or the optimization caused
    in_a_row: int = 0  # how many such steps there are in a row, up to `last_step`
    hardware_faults: Mapping[str, int] = field(default_factory=dict)  # by host

    def state(self) -> dict[str, Any]:
        """The history as JSON values."""
        return dataclasses.asdict(self)

    def with_fault_of(self, host: str) -> History:
        """The history after one more hardware fault of a host."""
        faults = {**self.hardware_faults, host: self.hardware_faults.get(host, 0) + 1}
        return dataclasses.replace(self, hardware_faults=faults)

    def with_violation_at(self, step: int) -> History:
        """The history after one more violation that the hardware did not cause."""
        in_a_row = self.in_a_row + 1 if step == self.last_step + 1 else 1
        return dataclasses.replace(self, last_step=step, in_a_row=in_a_row)


def decide(
    history: History, observation: Observation, config: GuardConfig
) -> tuple[History, StepVerdict]:
    """(the new history, what to do with a violating step)."""
    if observation.replay is not ReplayResult.SAME:
        history = history.with_fault_of(observation.host)
        if history.hardware_faults[observation.host] >= config.max_hardware_faults:
            return history, StepVerdict.GIVE_UP
        if observation.replay is ReplayResult.NORMAL:
            return history, StepVerdict.ACCEPT
    is_spike = observation.reason is ViolationReason.SPIKE
    policy = config.spike if is_spike else config.nonfinite
    if policy == "warn":
        return history, StepVerdict.ACCEPT
    history = history.with_violation_at(observation.step)
    if history.in_a_row >= config.max_violations:
        return history, StepVerdict.GIVE_UP
    return history, StepVerdict.ROLL_BACK if policy == "rollback" else StepVerdict.SKIP
