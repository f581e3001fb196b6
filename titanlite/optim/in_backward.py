"""Optimizer in backward: updates each parameter as soon as its gradient is complete.

The gradient is then freed, so only one FSDP group has gradients at a time.
"""

from __future__ import annotations

from torch import Tensor, nn

from titanlite.distributed.mesh import Mesh
from titanlite.optim.clip import GradNorms, combine_norms, shard_norms
from titanlite.optim.optimizer_set import OptimizerSet


class OptimizerInBackward:
    """Runs an optimizer's updates in the backward pass of a model; gradients cannot be clipped.

    Each gradient must be produced once per step, and the learning rate set before backward.
    """

    def __init__(self, model: nn.Module, optimizers: OptimizerSet):
        self._update_norms = optimizers.update_norms
        self._norms: dict[nn.Parameter, Tensor] = {}  # of this rank's shards, in this step
        self._optimizer_and_group_of = {
            parameter: (optimizer, group)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self._parameters = list(model.parameters())
        for parameter in self._optimizer_and_group_of:
            # FSDP2 calls these hooks too, after it has reduced the gradient of a shard.
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            return
        (self._norms[parameter],) = shard_norms([grad])
        # a group of this parameter alone: an update iterates over all parameters of its groups
        optimizer, group = self._optimizer_and_group_of[parameter]
        groups = list(optimizer.param_groups)
        optimizer.param_groups[:] = [{**group, "params": [parameter]}]
        try:
            with self._update_norms.around([parameter]):
                optimizer.step()
        finally:
            optimizer.param_groups[:] = groups
        parameter.grad = None

    def norms(self, mesh: Mesh | None = None) -> GradNorms:
        """The gradient norms of the step that the last backward has taken."""
        norms, self._norms = self._norms, {}
        return combine_norms(self._parameters, [norms.get(p) for p in self._parameters], mesh)
