"""Adaptive gradient clipping: the gradient of each output unit, relative to the unit's weights.

https://arxiv.org/abs/2102.06171, section 4. A unit is a vector, or a row of a matrix or of a stack.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.optim.shards import groups_that_shard, sum_over_shards


@dataclass(frozen=True)
class AdaptiveClip:
    """Limit the norm of a unit's gradient to `factor` times the norm of its weights.

    Weights with a norm below `eps` count as `eps`, so that a unit of zeros can learn.
    """

    factor: float
    eps: float = 1e-3
    excluded: frozenset[nn.Parameter] = frozenset()  # their gradients are not clipped

    @torch.no_grad()
    def scale(self, gradients: Iterable[tuple[nn.Parameter, Tensor]], loss_scale: float) -> None:
        """Scale this rank's shard of each gradient in place; a collective of all ranks.

        Sums the squares of units on several ranks with one all-reduce per group; does not wait.
        """
        clipped = [pair for pair in gradients if pair[0] not in self.excluded]
        squares = [  # [2, units] each: of the weights, of the gradients
            torch.stack((_unit_squares(parameter), _unit_squares(grad)))
            for parameter, grad in clipped
        ]
        # other ranks have parts of the same units if they shard the last dimension
        groups = [groups_that_shard(parameter, parameter.dim() - 1) for parameter, _ in clipped]
        sum_over_shards(zip(squares, groups, strict=True))
        for (_, grad), square in zip(clipped, squares, strict=True):
            weight_norm, grad_norm = square.sqrt()
            limit = self.factor * loss_scale * weight_norm.clamp(min=self.eps)
            # A gradient of 0 divides by 0: inf, which the clamp makes 1. NaN stays NaN.
            local = local_shard(grad)
            ratio = (limit / grad_norm).clamp(max=1.0).to(local.dtype)
            local.mul_(ratio.unsqueeze(-1) if local.dim() > 1 else ratio)


def adaptive_clip(
    named_parameters: Iterable[tuple[str, nn.Parameter]], factor: float
) -> AdaptiveClip:
    """The `AdaptiveClip` of a model; as in the paper, its output layer is not clipped."""
    output = (parameter for name, parameter in named_parameters if name.startswith("output."))
    return AdaptiveClip(factor, excluded=frozenset(output))


def _unit_squares(tensor: Tensor) -> Tensor:
    """Square norms of the units of this rank's shard, in fp32: [..., rows], [1] of a vector."""
    local = local_shard(tensor)
    units = local if local.dim() > 1 else local.unsqueeze(0)
    return torch.linalg.vector_norm(units, dim=-1, dtype=torch.float32).square()
