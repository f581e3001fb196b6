"""Vectors that are kept in low precision are updated in float32.

The gain of a norm is near 1, where two neighbors in bfloat16 are 0.004 to 0.008 apart: an update of
a usual learning rate is less than half of that, so rounding would undo every one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanlite.distributed.tensors import local_shard

MASTER = "float32"  # a vector in full precision, beside its moments in the optimizer's state


def is_low_vector(parameter: Tensor) -> bool:
    """Whether a parameter is a vector with fewer digits than its updates need."""
    return parameter.dim() < 2 and parameter.dtype in (torch.bfloat16, torch.float16)


def updating_vectors_in_float32(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same optimizer, which updates low-precision vectors by float32 copies in its state."""
    return type(kind.__name__, (_Float32Vectors, kind), {})


class _Float32Vectors(torch.optim.Optimizer):
    """A step with the float32 copy of each low-precision vector in the vector's place.

    So it is made by the optimizer's own kernels, with moments in float32. The copy is sharded and
    saved as the moments are.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for parameter, state in self.state.items():  # where it is there before the first step
            if is_low_vector(parameter):
                state[MASTER] = parameter.detach().float()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        groups, copies = self.param_groups, self._copies()
        self.param_groups = [
            {**group, "params": [copies.get(p, p) for p in group["params"]]} for group in groups
        ]
        try:
            super().step()
        finally:
            self.param_groups = groups
            for parameter, copy in copies.items():
                self.state[parameter] = {MASTER: copy.detach(), **self.state.pop(copy, {})}
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
                copy = nn.Parameter(_in_float32(parameter, state.pop(MASTER, None)))
                copy.grad = parameter.grad.float()
                if state:
                    self.state[copy] = state
                copies[parameter] = copy
        return copies


def _in_float32(parameter: nn.Parameter, copy: Tensor | None) -> Tensor:
    """The float32 values of a vector: those of `copy` that round to it, and else its own.

    Others are of weights that were replaced since, as by loading those of another run.
    """
    if copy is None:
        return parameter.detach().float()
    low, own = local_shard(parameter.detach()), local_shard(copy)
    own.copy_(torch.where(own.to(low.dtype) == low, own, low.float()))
    return copy
