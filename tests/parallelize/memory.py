"""Bytes that an act takes from the allocator of the CPU: at most at once, and still at its end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def taken(act: Callable[[], object]) -> tuple[int, int]:
    """(most bytes at once, bytes still there at the end), of what `act` itself takes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = act()
    changes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = list(accumulate(changes, initial=0))
    del kept
    return max(held), held[-1]
