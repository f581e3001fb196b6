"""SGD and Lion: the update of an element depends on that element alone.

They update local shards, so they need no communication and every layout makes the same update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.optim.conditional import ConditionalBase, write_if
from titanlite.optim.fp32_vectors import is_low_vector
from titanlite.optim.mup import elementwise_update, gradient_update
from titanlite.optim.recipe import OptimizerKeys, OptimizerRecipe, no_state, one_moment
from titanlite.optim.shards import sharded_zeros
from titanlite.settings import Fraction


class ElementwiseOptimizer(ConditionalBase):
    """At most one moment, computed in fp32; stored in the params' dtype, but of vectors in fp32."""

    moment = "momentum_buffer"  # name in the state

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        foreach: bool = False,
        has_moment: bool = True,
        **options: Any,
    ):
        """`options`: `lr` and all that `compute_update` reads of a group."""
        super().__init__(groups, {"weight_decay": 0.0, **options})
        self._foreach, self._has_moment = foreach, has_moment
        for parameter in (p for group in self.param_groups for p in group["params"]):
            dtype = torch.float32 if is_low_vector(parameter) else parameter.dtype
            moments = {self.moment: sharded_zeros(parameter, dtype)} if has_moment else {}
            self.state[parameter] = moments

    def update(self, accept: Tensor | None) -> None:
        for group in self.param_groups:
            # A shard without elements has nothing to update: other ranks have all of it.
            members = [p for p in group["params"] if p.grad is not None and local_shard(p).numel()]
            for batch in [members] if self._foreach and members else [[p] for p in members]:
                self._step_batch(batch, group, accept)

    def _step_batch(
        self, parameters: Sequence[nn.Parameter], group: dict[str, Any], accept: Tensor | None
    ) -> None:
        stored = [local_shard(p) for p in parameters]
        new = [weight.float() for weight in stored]
        grads = [local_shard(p.grad).float() for p in parameters if p.grad is not None]
        if self._has_moment:
            stored += [local_shard(self.state[p][self.moment]) for p in parameters]
            new += [moment.float() for moment in stored[len(parameters) :]]
        weights, moments = new[: len(parameters)], new[len(parameters) :]
        for old, values in zip(
            stored, self.compute_update(weights, grads, moments, group), strict=True
        ):
            write_if(old, values, accept)

    @abstractmethod
    def compute_update(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict
    ) -> list[Tensor]:
        """The new weights, then the new moments; the arguments do not change."""


@dataclass(frozen=True)
class ElementwiseKeys(OptimizerKeys):
    """What all these optimizers can do."""

    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # foreach: one kernel per operation; for-loop and fused: one per operation per parameter
    early_step_in_backward: bool = False
    # update each parameter in backward, as soon as its gradient is complete, and free the gradient


@dataclass(frozen=True)
class SGDKeys(ElementwiseKeys):
    """SGD's keys of [optimizer]."""

    momentum: Fraction = 0.0  # 0: none, and no state
    nesterov: bool = False  # look ahead by one step of the momentum

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options = {"lr": lr, "momentum": self.momentum, "nesterov": self.nesterov}
        how = {"foreach": self.implementation == "foreach", "has_moment": self.momentum > 0}
        return OptimizerRecipe(
            SGD,
            {**options, **how},
            state_bytes=one_moment if self.momentum else no_state,
            moment_rates=("momentum",),
            mup_rule=gradient_update,
        )


@dataclass(frozen=True)
class LionKeys(ElementwiseKeys):
    """Lion's keys of [optimizer]."""

    beta1: Fraction = 0.9  # weight of the moment in the update
    beta2: Fraction = 0.95  # decay rate of the moment

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options = {"lr": lr, "betas": (self.beta1, self.beta2)}
        return OptimizerRecipe(
            Lion,
            {**options, "foreach": self.implementation == "foreach"},
            state_bytes=one_moment,
            moment_rates=("beta2",),
            mup_rule=elementwise_update,
        )


class SGD(ElementwiseOptimizer):
    """SGD with momentum, and Nesterov's (https://proceedings.mlr.press/v28/sutskever13.html).

    The formula of torch.optim.SGD. Weight decay is coupled: it is added to the gradient.
    """

    def compute_update(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict
    ) -> list[Tensor]:
        if group["weight_decay"]:
            grads = _add_scaled(grads, weights, group["weight_decay"])
        if moments:
            moments = _add_scaled(grads, moments, group["momentum"])
            grads = _add_scaled(grads, moments, group["momentum"]) if group["nesterov"] else moments
        return _add_scaled(weights, grads, -group["lr"]) + moments


class Lion(ElementwiseOptimizer):
    """Sign of an interpolation of moment and gradient (https://arxiv.org/abs/2302.06675).

    Weight decay is decoupled: the weights shrink by the learning rate times the weight decay.
    """

    moment = "exp_avg"

    def compute_update(
        self, weights: list[Tensor], grads: list[Tensor], moments: list[Tensor], group: dict
    ) -> list[Tensor]:
        (beta1, beta2), lr = group["betas"], group["lr"]
        signs = torch._foreach_sign(torch._foreach_lerp(moments, grads, 1 - beta1))
        decayed = torch._foreach_mul(weights, 1 - lr * group["weight_decay"])
        new_moments = torch._foreach_lerp(moments, grads, 1 - beta2)
        return _add_scaled(decayed, signs, -lr) + list(new_moments)


def _add_scaled(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> list[Tensor]:
    """tensors + factor * others; one kernel for all (there is no public equivalent)."""
    return list(torch._foreach_add(list(tensors), list(others), alpha=factor))
