"""Optimizers that decide on the device whether they take a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ConditionalOptimizer(Protocol):
    """An optimizer that can decide on the device whether it takes a step."""

    def step_if(self, accept: Tensor) -> None:
        """Take a step if `accept` [] is true; otherwise change no bit of weights and state,
        except step counters in host memory, which `uncount_steps` corrects.

        Does not wait for the device. The gradients may be inf or NaN if `accept` is false.
        """

    def uncount_steps(self, steps: int) -> None:
        """Subtract `steps` rejected calls of `step_if` from step counters in host memory."""


@runtime_checkable
class ScalingOptimizer(Protocol):
    """An optimizer that multiplies gradients while it reads them, not in a pass of its own."""

    def step_scaled(self, accept: Tensor | None, grad_factor: Tensor | None) -> None:
        """`step_if` with the gradients times `grad_factor` []; None: take the step, times 1."""


@runtime_checkable
class OverlappingOptimizer(Protocol):
    """An optimizer that communicates; other optimizers can compute meanwhile."""

    def begin_step(self, accept: Tensor | None) -> Callable[[], None]:
        """Start a step, and its communication; the returned function completes it.

        `accept` is that of `ConditionalOptimizer.step_if`; None: take the step.
        """


class ConditionalBase(torch.optim.Optimizer):
    """A `ConditionalOptimizer`; subclasses implement `update`.

    The state of a parameter may have a counter `step`, in host memory.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures
        self.update(None)

    @torch.no_grad()
    def step_if(self, accept: Tensor) -> None:
        self.update(accept)

    def uncount_steps(self, steps: int) -> None:
        for state in self.state.values():
            if "step" in state:
                state["step"] -= steps

    @abstractmethod
    def update(self, accept: Tensor | None) -> None:
        """Take a step, unless `accept` [] is false; None: always."""


def write_if(target: Tensor, value: Tensor, accept: Tensor | None) -> None:
    """Copy `value` to `target`, unless `accept` [] is false; None: always.

    Not a multiplication by 0, because 0 times NaN is NaN.
    """
    target.copy_(value if accept is None else torch.where(accept, value.to(target.dtype), target))
