"""Stepping in backward: a parameter is updated as soon as its gradient is there.

The gradient is then forgotten, so that no more than one group of FSDP's has gradients at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate


class EarlySteps:
    """Takes an optimizer's steps in the backward passes of a model, which must not be clipped.

    Each gradient must come once a step, and the rate be set before backward. The optimizer stays
    the one it was: its state is saved and loaded as ever.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._squares: dict[tuple, Tensor] = {}  # of this rank's shards: by mesh and placements
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        for parameter in model.parameters():
            # FSDP2 calls these hooks too, when it has reduced the gradient of a shard.
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self._note(gradient)
        groups = self.optimizer.param_groups
        # Only this parameter, rather than a look at each: they would be as many looks as squares.
        self.optimizer.param_groups = [{**self._group_of[parameter], "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None

    def _note(self, gradient: Tensor) -> None:
        sharded = isinstance(gradient, DTensor)
        key = (gradient.device_mesh, gradient.placements) if sharded else (None, ())
        local = gradient.to_local() if sharded else gradient
        square = torch.linalg.vector_norm(local, dtype=torch.float32).square()
        self._squares[key] = self._squares[key] + square if key in self._squares else square

    def norm(self) -> Tensor:
        """The norm of the whole gradient of the step that was taken, 0-d, the same on all ranks."""
        squares, self._squares = self._squares, {}
        return torch.stack([_summed(square, *key) for key, square in squares.items()]).sum().sqrt()


def _summed(square: Tensor, mesh, placements) -> Tensor:
    """Over the ranks that share what was squared; those that all have it have it once."""
    if mesh is None:
        return square
    parts = [Replicate() if place.is_replicate() else Partial() for place in placements]
    return DTensor.from_local(square, mesh, parts, run_check=False).full_tensor()
