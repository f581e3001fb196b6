"""Which checkpoints may go. Pure: it is given the whole ones, and crash litter is not among them."""

from __future__ import annotations

from collections.abc import Iterable


def steps_to_remove(steps: Iterable[int], keep_latest: int) -> list[int]:
    """The steps of whole checkpoints beyond the latest `keep_latest` (0: keep all), oldest first."""
    ordered = sorted(steps)
    return ordered[:-keep_latest] if keep_latest > 0 else []
