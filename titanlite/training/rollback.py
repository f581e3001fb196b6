"""Roll-back, the policy: which checkpoint to load, and which samples to skip.

Pure functions of the run's progress. Nothing here depends on when the trouble was noticed, on the
time, or on what an earlier process of the run did: a run that is killed at any moment of a
roll-back, and restarted, takes the same decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from titanlite.data import PositionWindow


@dataclass(frozen=True)
class RollbackPolicy:
    """The settings of [guard] that decide what a run does after a roll-back."""

    steps: int  # of the first window, before the trouble and after it
    lr_factor: float  # of the learning rate in the window; 0: the window is skipped
    max_tries: int  # for one trouble

    @property
    def longest_steps(self) -> int:
        """Steps before the trouble at which the largest window starts."""
        return self.steps << (self.max_tries - 1)


@dataclass(frozen=True)
class Trouble:
    """The step that caused a roll-back."""

    step: int  # counted from 1
    position: int  # first position that it consumed
    samples: int  # that it consumed
    reason: str  # one line with values


@dataclass(frozen=True)
class RollbackTry:
    """A roll-back: its trouble, and what the run does with the positions around it."""

    number: int  # of this try for the same trouble, from 1
    trouble: Trouble
    window: PositionWindow

    def __str__(self) -> str:
        window, factor = self.window, self.window.lr_factor
        action = f"trained with learning rate x {factor:g}" if factor else "skipped"
        return (
            f"try {self.number}: step {self.trouble.step}, samples {self.trouble.position}…"
            f"{self.trouble.position + self.trouble.samples - 1}: {self.trouble.reason};"
            f" samples {window.start}…{window.end - 1} {action}"
        )


@dataclass(frozen=True)
class RollbackHistory:
    """The roll-backs of a run, oldest first. Checkpoints store it."""

    tries: tuple[RollbackTry, ...] = ()

    @cached_property
    def windows(self) -> tuple[PositionWindow, ...]:
        """The windows in force: of each trouble, that of its last try."""
        following = [later.number for later in self.tries[1:]]
        last = [number == 1 for number in following] + [True] * bool(self.tries)
        return tuple(t.window for t, is_last in zip(self.tries, last, strict=True) if is_last)

    def tries_for(self, trouble: Trouble) -> tuple[RollbackTry, ...]:
        """The tries for the same trouble so far; empty if `trouble` is a new one.

        It is new once the run has trained as many samples after the last window as the window
        has. By then the run is past the earlier trouble, so it cannot roll back forever.
        """
        if not self.tries:
            return ()
        latest = self.tries[-1]
        if trouble.position >= 2 * latest.window.end - latest.window.start:
            return ()
        return self.tries[len(self.tries) - latest.number :]

    def next_try(self, trouble: Trouble, policy: RollbackPolicy) -> RollbackTry | None:
        """The next try; None if all tries for this trouble have failed.

        Each try has a window of twice the size, and with `lr_factor` a learning rate that is lower
        by that factor again. With the default `steps`, the first window has 201 batches: 100 before
        the trouble, its own, and 100 after it. PaLM's training skipped 200 to 500 batches by hand,
        from a checkpoint about 100 steps before the spike (https://arxiv.org/abs/2204.02311,
        section 5.1).
        """
        earlier = self.tries_for(trouble)
        if len(earlier) >= policy.max_tries:
            return None
        first = earlier[0].trouble if earlier else trouble
        margin = (policy.steps << len(earlier)) * trouble.samples
        window = PositionWindow(
            max(0, first.position - margin),
            trouble.position + trouble.samples + margin,
            policy.lr_factor ** (len(earlier) + 1),
        )
        return RollbackTry(len(earlier) + 1, trouble, window)

    def with_try(self, attempt: RollbackTry) -> RollbackHistory:
        """The history after `attempt`."""
        return RollbackHistory((*self.tries, attempt))

    def to_json(self) -> list[dict[str, Any]]:
        """The history as JSON values."""
        return [asdict(attempt) for attempt in self.tries]

    @classmethod
    def from_json(cls, entries: Sequence[dict[str, Any]]) -> RollbackHistory:
        """The history that `to_json` wrote; raises ValueError, TypeError or KeyError for others."""
        tries = [
            RollbackTry(e["number"], Trouble(**e["trouble"]), PositionWindow(**e["window"]))
            for e in entries
        ]
        for number, attempt in enumerate(tries):
            _check_try(attempt, tries[number - 1].number if number else 0)
        return cls(tuple(tries))


def _check_try(attempt: RollbackTry, number_before: int) -> None:
    """Raise ValueError for a try that `RollbackHistory.next_try` does not return."""
    trouble, window = attempt.trouble, attempt.window
    counts = (trouble.step, trouble.position, trouble.samples, window.start, window.end)
    is_valid = (
        all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
        and attempt.number in (1, number_before + 1)
        and window.start < window.end
        and type(trouble.reason) is str
        and 0 <= window.lr_factor < 1  # not NaN
    )
    if not is_valid:
        raise ValueError(f"{attempt} is not a roll-back")


def steps_to_roll_back_to(
    positions: dict[int, int], attempt: RollbackTry, first: Trouble, interval: int
) -> list[int]:
    """Steps of the checkpoints to roll back to, in order of preference.

    `positions` are those of the checkpoints, by step. Preferred is the newest one from before the
    window: the run then repeats what it did up to the window, so that the result does not depend on
    which one it is. Where no checkpoint is that old, the oldest one from before the `first` trouble
    is used: one of a multiple of `interval`, because others are there only if the run was stopped.
    """
    old = [step for step, position in positions.items() if position <= attempt.window.start]
    later = [
        step
        for step, position in positions.items()
        if attempt.window.start < position <= first.position and step % interval == 0
    ]
    return sorted(old, reverse=True) + sorted(later)
