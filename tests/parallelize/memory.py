"""Measure what a function allocates on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def measure_allocations(function: Callable[[], object]) -> tuple[int, int]:
    """(peak bytes, bytes still allocated when it returns) of a call of `function`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    allocated = list(accumulate(changes, initial=0))
    del result  # after the profile: what it refers to counts as still allocated
    return max(allocated), allocated[-1]
