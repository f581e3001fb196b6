"""The optimizers of a run, each for some of the parameters, used as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from titanlite.optim.update_norms import UpdateNorms

LR_FACTOR = "lr_factor"  # key in a parameter group; multiplies the learning rate of the schedule


@runtime_checkable
class ConditionalOptimizer(Protocol):
    """An optimizer that can decide on the device whether it takes a step."""

    def step_if(self, accept: Tensor) -> None:
        """Take a step if `accept` [] is true; otherwise change no bit of weights and state.

        Does not wait for the device. The gradients may be inf or NaN if `accept` is false.
        """

    def uncount_steps(self, steps: int) -> None:
        """Take back `steps` calls of `step_if` with false in a step counter in host memory."""


class OptimizerSet:
    """The optimizers of a model; iterating yields them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = tuple(optimizers)
        self.update_norms = UpdateNorms()

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter; empty where it has none yet."""
        states = {p: state for optimizer in self for p, state in optimizer.state.items()}
        return defaultdict(dict, states)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step: in each group, times the group's factor."""
        for group in self.param_groups:
            group["lr"] = lr * group[LR_FACTOR]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self:
            with self._measured(optimizer):
                optimizer.step()

    def step_if(self, accept: Tensor) -> None:
        """Take a step if `accept` [] is true; otherwise change no bit of weights and state.

        Waits for the device only in optimizers that are not a `ConditionalOptimizer`.
        """
        for optimizer in self:
            with self._measured(optimizer):
                if isinstance(optimizer, ConditionalOptimizer):
                    optimizer.step_if(accept)
                elif bool(accept):
                    optimizer.step()

    def uncount_steps(self, steps: int) -> None:
        """Take back `steps` calls of `step_if` with false."""
        for optimizer in self:
            if isinstance(optimizer, ConditionalOptimizer):
                optimizer.uncount_steps(steps)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for optimizer in self:
            optimizer.zero_grad()

    def _measured(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return self.update_norms.around(parameters)
