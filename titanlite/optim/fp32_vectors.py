"""Updates low-precision vectors through float32 copies.

The gain of a norm is near 1, where neighbouring bfloat16 numbers are 0.004 to 0.008 apart. An
update at a usual learning rate is less than half of that, so rounding would undo every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard

MASTER = "float32"  # key of the float32 copy in the optimizer's state, next to the moments


def is_low_vector(parameter: Tensor) -> bool:
    """Whether a parameter is a vector whose dtype would round its updates away."""
    return parameter.dim() < 2 and parameter.dtype in (torch.bfloat16, torch.float16)


def updating_vectors_in_float32(
    optimizer_class: type[torch.optim.Optimizer],
) -> type[torch.optim.Optimizer]:
    """A subclass that updates low-precision vectors through float32 copies in its state."""
    names = [n for n in ("step", "step_if", "step_scaled") if hasattr(optimizer_class, n)]
    methods = {name: _on_copies(getattr(optimizer_class, name)) for name in names}
    return type(optimizer_class.__name__, (_Float32Vectors, optimizer_class), methods)


def _on_copies(step: Callable[..., None]) -> Callable[..., None]:
    """A method that calls `step` while float32 copies replace the vectors."""

    def method(self: _Float32Vectors, *arguments: Tensor | None, **closure: None) -> None:
        with self._float32_copies():  # torch's checkpoints call step(closure=None)
            step(self, *arguments, **closure)

    return method


class _Float32Vectors(torch.optim.Optimizer):
    """Replaces each low-precision vector by its float32 copy during a step.

    The optimizer's own kernels update the copy, which is sharded and saved like its moments.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for parameter, state in self.state.items():  # if the constructor allocates it
            if is_low_vector(parameter):
                state[MASTER] = parameter.detach().float()

    @contextmanager
    def _float32_copies(self) -> Iterator[None]:
        """Let the optimizer see the copies in the block; afterwards, round them to the vectors."""
        groups, copies = self.param_groups, self._copies()
        self.param_groups = [
            {**group, "params": [copies.get(p, p) for p in group["params"]]} for group in groups
        ]
        try:
            yield
        finally:
            self.param_groups = groups
            for parameter, copy in copies.items():
                self.state[parameter] = {MASTER: copy.detach(), **self.state.pop(copy, {})}
        with torch.no_grad():
            for parameter, copy in copies.items():
                local_shard(parameter).copy_(local_shard(copy))

    def _copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """A float32 parameter, with gradient and state, for each vector that has a gradient."""
        copies = {}
        for group in self.param_groups:
            for parameter in filter(is_low_vector, group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state.pop(parameter, {})
                copy = nn.Parameter(_float32_values(parameter, state.pop(MASTER, None)))
                copy.grad = parameter.grad.float()
                if state:
                    self.state[copy] = state
                copies[parameter] = copy
        return copies


def _float32_values(parameter: nn.Parameter, copy: Tensor | None) -> Tensor:
    """`copy`, corrected where it does not round to the vector's value; if None, a new copy.

    They differ after the weights were replaced, for example by those of another run.
    """
    if copy is None:
        return parameter.detach().float()
    low, high = local_shard(parameter.detach()), local_shard(copy)
    high.copy_(torch.where(high.to(low.dtype) == low, high, low.float()))
    return copy
