"""What the table of optimizers says about each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

StateBytes = Callable[[torch.Size, int], float]
# (global shape of a parameter, bytes per element of the parameter) -> bytes of its optimizer state


def _two_moments(shape: torch.Size, param_bytes: int) -> float:
    return 2 * shape.numel() * param_bytes


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer class with its arguments, and the facts that checks and estimates need."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]  # arguments other than the parameter groups
    uses: tuple[str, ...] = field(default=(), compare=False)
    # keys of [optimizer] that it uses, besides the learning rate and the weight decay; others are
    # refused if they are set. "early_step_in_backward": it updates each parameter by itself,
    # without communication
    state_bytes: StateBytes = field(default=_two_moments, compare=False)  # on the device
    moment_rates: tuple[str, ...] = field(default=(), compare=False)
    # keys of the decay rates of moments that are stored in the dtype of the parameters
