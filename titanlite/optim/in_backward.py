"""Stepping in backward: a parameter is updated as soon as its gradient is there.

The gradient is then forgotten, so that no more than one group of FSDP's has gradients at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titanlite.distributed.mesh import Mesh
from titanlite.optim.clip import GradNorms, combine_norms, shard_norms


class OptimizerInBackward:
    """Takes an optimizer's steps in the backward passes of a model, which must not be clipped.

    Each gradient must come once a step, and the rate be set before backward. The optimizer stays
    the one it was: its state is saved and loaded as ever.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._norms: dict[nn.Parameter, Tensor] = {}  # of this rank's shards, in this step
        self._group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
        self._parameters = list(model.parameters())
        for parameter in self._parameters:
            # FSDP2 calls these hooks too, when it has reduced the gradient of a shard.
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        (self._norms[parameter],) = shard_norms([gradient])
        groups = self.optimizer.param_groups
        # Only this parameter, rather than a look at each: they would be as many looks as squares.
        self.optimizer.param_groups = [{**self._group_of[parameter], "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None

    def norms(self, mesh: Mesh | None = None) -> GradNorms:
        """The norms of the gradient of the step that was taken."""
        norms, self._norms = self._norms, {}
        return combine_norms(self._parameters, [norms.get(p) for p in self._parameters], mesh)
