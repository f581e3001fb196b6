"""Which parameters are decayed, by the pattern of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, no_decay: Sequence[str]
) -> list[dict]:
    """Two groups for a torch optimizer: those decayed, and those whose name fits `no_decay`."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in named:
        spared = any(fnmatchcase(name, pattern) for pattern in no_decay)
        (kept if spared else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
