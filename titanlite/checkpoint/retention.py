"""Which checkpoints may go. Pure: it is given the whole ones; crash litter is not among them."""

from __future__ import annotations

from collections.abc import Iterable


def steps_to_remove(steps: Iterable[int], keep_latest: int, keep_every: int = 0) -> list[int]:
    """The steps of whole checkpoints that are too many, oldest first.

    The latest `keep_latest` stay (0: all), and those of every `keep_every`-th step (0: none).
    """
    ordered = sorted(steps)
    surplus = ordered[:-keep_latest] if keep_latest > 0 else []
    return [step for step in surplus if not keep_every or step % keep_every]
