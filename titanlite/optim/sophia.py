"""Sophia (https://arxiv.org/abs/2305.14342): momentum divided by the diagonal of the Hessian."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from titanlite.distributed.collectives import local_shard
from titanlite.optim.conditional import ConditionalBase, write_if
from titanlite.optim.fp32_vectors import is_low_vector
from titanlite.optim.recipe import OptimizerKeys, OptimizerRecipe
from titanlite.optim.shards import sharded_zeros
from titanlite.settings import Fraction, Positive, Range


@dataclass(frozen=True)
class SophiaKeys(OptimizerKeys):
    """Sophia's keys of [optimizer]; the defaults are the paper's for GPT-2."""

    beta1: Fraction = 0.96  # decay rate of the momentum
    beta2: Fraction = 0.99  # decay rate of the Hessian's estimates
    eps: Annotated[float, Range(0)] = 1e-12  # least divisor of the momentum
    gamma: Annotated[float, Range(0)] = 0.05
    # multiplies the Hessian: with less, more elements are clipped to the learning rate
    hessian_frequency: Positive = 10  # steps from one estimate to the next

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options = {"lr": lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
        options |= {"gamma": self.gamma, "frequency": self.hessian_frequency}
        return OptimizerRecipe(Sophia, options, moment_rates=("beta1", "beta2"))


class Sophia(ConditionalBase):
    """Each element changes by at most the learning rate; weight decay is decoupled.

    Both moments are in the dtype of the weights, those of vectors in fp32. Before the first
    estimate, each element changes by the learning rate in the direction of the momentum.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, frequency: int, **options: Any):
        """`frequency`: steps from one `update_hessian` to the next; `options`: keys of a group."""
        super().__init__(groups, {"weight_decay": 0.0, **options})
        self.frequency = frequency
        for parameter in (p for group in self.param_groups for p in group["params"]):
            dtype = torch.float32 if is_low_vector(parameter) else parameter.dtype
            names = ("exp_avg", "hessian")
            self.state[parameter] = {name: sharded_zeros(parameter, dtype) for name in names}

    def update(self, accept: Tensor | None) -> None:
        for weight, grad, state, group in self._shards():
            average, hessian = state["exp_avg"], state["hessian"].float()
            momentum = torch.lerp(average.float(), grad, 1 - group["betas"][0])
            change = momentum / (group["gamma"] * hessian).clamp(min=group["eps"])
            decayed = weight.float() * (1 - group["lr"] * group["weight_decay"])
            write_if(average, momentum, accept)
            write_if(weight, decayed - group["lr"] * change.clamp(-1, 1), accept)

    @torch.no_grad()
    def update_hessian(self, tokens: Tensor, accept: Tensor | None) -> None:
        """Average the Hessian with an estimate: the squares of the gradients, times `tokens` [].

        The gradients are of the mean loss over `tokens` sampled labels (algorithm 2). `accept`: as
        in `update`; elements whose estimate is inf or NaN do not change either.
        """
        for _, grad, state, group in self._shards():
            hessian, estimate = state["hessian"], grad.square() * tokens.to(grad.device)
            new = torch.lerp(hessian.float(), estimate, 1 - group["betas"][1])
            finite = estimate.isfinite()  # the guard has judged other gradients
            write_if(hessian, new, finite if accept is None else finite & accept)

    def _shards(self) -> Iterable[tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]]:
        """(weight, gradient in fp32, state, group) of each shard that has elements."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and local_shard(p).numel():
                    state = {name: local_shard(value) for name, value in self.state[p].items()}
                    yield local_shard(p), local_shard(p.grad).float(), state, group
