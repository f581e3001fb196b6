"""Windows of positions that a run skips, or trains through with a lower learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PositionWindow:
    """The positions [start, end) of the order of samples, and what the run does with them."""

    start: int
    end: int
    lr_factor: float = 0.0  # of the learning rate of steps in the window; 0: they are skipped

    def overlaps(self, position: int, samples: int) -> bool:
        """Whether a step that consumes `samples` from `position` on reaches into the window."""
        return self.start < position + samples and position < self.end


def next_start(position: int, samples: int, windows: Iterable[PositionWindow]) -> int:
    """First position of the next step, which consumes `samples`, of a run at `position`.

    A step that would reach into a skipped window starts at the end of the window instead.
    """
    skipped = [window for window in windows if window.lr_factor == 0]
    while ends := [w.end for w in skipped if w.overlaps(position, samples)]:
        position = max(ends)
    return position


def window_lr_factor(position: int, samples: int, windows: Iterable[PositionWindow]) -> float:
    """Factor of the learning rate for a step that consumes `samples` from `position` on."""
    factors = [w.lr_factor for w in windows if w.lr_factor and w.overlaps(position, samples)]
    return min(factors, default=1.0)
