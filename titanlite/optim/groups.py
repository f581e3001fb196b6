"""Parameter groups: which parameters have weight decay, by name pattern."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, no_decay: Sequence[str]
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: parameters with decay, and those that match `no_decay`."""
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in named:
        excluded = any(fnmatchcase(name, pattern) for pattern in no_decay)
        (undecayed if excluded else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@contextmanager
def only_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[None]:
    """Let the optimizer have only this group inside the block."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group]
    try:
        yield
    finally:
        optimizer.param_groups[:] = groups
