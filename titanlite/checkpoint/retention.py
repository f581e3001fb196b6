"""Which checkpoints to remove: a pure function of the steps of the valid ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def steps_to_remove(steps: Iterable[int], keep_latest: int, keep_every: int = 0) -> list[int]:
    """The steps of valid checkpoints to remove, oldest first.

    Kept are the latest `keep_latest` (0: all), and multiples of `keep_every` (0: none).
    """
    surplus = all_but_last(sorted(steps), keep_latest)
    return [step for step in surplus if not keep_every or step % keep_every]


def all_but_last(ordered: list[T], keep: int) -> list[T]:
    """The entries before the last `keep`; empty if `keep` is 0, which keeps all."""
    return ordered[:-keep] if keep > 0 else []
