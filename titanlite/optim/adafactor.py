"""Adafactor (https://arxiv.org/abs/1804.04235): means of the squares by row and column only.

Row means, column means and the RMS of weights and updates are of the whole matrix, in every layout:
each rank sums over its shards, and all-reduces add the sums of all parameters together. A step has
two all-reduces in each dimension of the mesh that shards parameters: 2 with FSDP, 4 with FSDP and
TP. The first sends 12 bytes per matrix and 4 per column of it (4 per row in the dimension that
shards columns), and 4 bytes per other parameter; the second 4 bytes per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from titanlite.distributed.collectives import local_shard
from titanlite.optim.conditional import ConditionalBase, write_if
from titanlite.optim.mup import elementwise_update
from titanlite.optim.recipe import OptimizerKeys, OptimizerRecipe
from titanlite.optim.shards import groups_that_shard, is_sharding, sharded_zeros, sum_over_shards
from titanlite.settings import Range

SQUARE_EPS = 1e-30  # epsilon_1 of the paper, added to the squares of the gradient
MIN_WEIGHT_RMS = 1e-3  # epsilon_2 of the paper, so that weights can leave 0


@dataclass(frozen=True)
class AdafactorKeys(OptimizerKeys):
    """Adafactor's keys of [optimizer]."""

    beta2_decay: Annotated[float, Range(-1, -0.1)] = -0.8
    # exponent c of the decay rate 1 - t^c of the second moment at step t
    clip_threshold: Annotated[float, Range(0.01)] = 1.0
    # largest RMS of a parameter's update, as a factor of the learning rate
    scale_parameter: bool = True
    # multiply the learning rate by the RMS of the parameter (at least 0.001)

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options = {
            "lr": lr,
            "beta2_decay": self.beta2_decay,
            "clip_threshold": self.clip_threshold,
            "scale_parameter": self.scale_parameter,
        }
        return OptimizerRecipe(
            Adafactor,
            options,
            state_bytes=_adafactor_state_bytes,
            # With the scale, the update depends on max(RMS of the parameter, 0.001). The initial
            # RMS of a wide model is below 0.001, so no muP rule holds.
            mup_rule=None if self.scale_parameter else elementwise_update,
        )


def _adafactor_state_bytes(shape: torch.Size, param_bytes: int) -> float:
    """Bytes of the state of a parameter, which is fp32 for every dtype of the parameters."""
    return 4 * (sum(shape) if _is_factored(shape) else shape.numel())


def _is_factored(shape: Sequence[int]) -> bool:
    return len(shape) == 2


class Adafactor(ConditionalBase):
    """Adafactor without first moment; the learning rate comes from the schedule.

    With `scale_parameter` it is multiplied by the RMS of the parameter. Weight decay is decoupled:
    the weights shrink by the learning rate times the weight decay, as in torch.optim.Adafactor.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any):
        """`options`: `lr`, and all keys of `AdafactorKeys`."""
        super().__init__(groups, {"weight_decay": 0.0, **options})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            moments = _initial_moments(parameter)
            self.state[parameter] = {"step": torch.tensor(0.0), **moments}

    def update(self, accept: Tensor | None) -> None:
        updates = [
            _AdafactorUpdate(parameter, self.state[parameter], group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        sum_over_shards(part for update in updates for part in update.sums_of_squares())
        for update in updates:
            update.advance_moments(accept)
        sum_over_shards(part for update in updates for part in update.sum_of_updates())
        for update in updates:
            update.write_weight(accept)


def _initial_moments(parameter: nn.Parameter) -> dict[str, Tensor]:
    if not _is_factored(parameter.shape):
        return {"variance": sharded_zeros(parameter, torch.float32)}
    vectors = {}
    for name, kept, reduced in (("row_var", 0, 1), ("col_var", 1, 0)):
        vectors[name] = sharded_zeros(
            parameter,
            torch.float32,
            shape=parameter.shape[kept : kept + 1],
            local_shape=local_shard(parameter).shape[kept : kept + 1],
            placements=_placements_of_mean(parameter, kept, reduced),
        )
    return vectors


def _placements_of_mean(parameter: Tensor, kept: int, reduced: int) -> list[Placement] | None:
    """Placements of a matrix's mean over dimension `reduced`: a vector over dimension `kept`."""
    if not isinstance(parameter, DTensor):
        return None
    return [
        Replicate()
        if placement.is_replicate() or is_sharding(placement, reduced)
        # rows keep their placement: it is strided if both FSDP and TP shard them
        else (placement if kept == 0 else Shard(0))
        for placement in parameter.placements
    ]


_Sum = tuple[Tensor, list[dist.ProcessGroup]]  # an item of `sum_over_shards`


class _AdafactorUpdate:
    """The update of one parameter: this rank's shard of it, and sums over the whole of it.

    Temporaries of the size of the shard are not stored between the two all-reduces but recomputed,
    so that at any time only those of one parameter are in memory.
    """

    def __init__(self, parameter: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any]):
        assert parameter.grad is not None
        state["step"] += 1  # in host memory, so reading it does not wait for the device
        self._new_weight = state["step"].item() ** group["beta2_decay"]  # of the new squares
        self._options, self._shape = group, parameter.shape
        self._weight, self._grad = local_shard(parameter), local_shard(parameter.grad)
        self._moments = {k: local_shard(v) for k, v in state.items() if k != "step"}
        self._row_groups, self._column_groups = (groups_that_shard(parameter, d) for d in (0, 1))
        self._groups = groups_that_shard(parameter)
        self._sums: dict[str, Tensor] = {}  # over the whole parameter, after the all-reduces

    def sums_of_squares(self) -> Iterator[_Sum]:
        """Sums over the shards of gradient and weight."""
        weight_square = self._weight.float().square().sum()
        if not _is_factored(self._shape):
            self._sums["total"] = weight_square.view(1)
            yield (self._sums["total"], self._groups)
            return
        square = self._grad.float().square()
        rows, columns, row_var = square.sum(1), square.sum(0), self._moments["row_var"]
        # Ranks that shard the columns have the same elements of row_var.
        copies = math.prod(group.size() for group in self._column_groups)
        total = torch.stack([weight_square, rows.sum(), row_var.sum() / copies])
        self._sums = {"rows": rows, "columns": columns, "total": total}
        yield (rows, self._column_groups)
        yield (columns, self._row_groups)
        yield (total, self._groups)

    def advance_moments(self, accept: Tensor | None) -> None:
        """Update the second moment, from which the update is computed."""
        if not _is_factored(self._shape):
            square = self._grad.float().square() + SQUARE_EPS
            self._new = {
                "variance": torch.lerp(self._moments["variance"], square, self._new_weight)
            }
        else:
            rows, columns = self._shape
            _, square_sum, row_var_sum = self._sums["total"].unbind()
            means = {
                "row_var": (self._moments["row_var"], self._sums["rows"] / columns),
                "col_var": (self._moments["col_var"], self._sums["columns"] / rows),
                "mean": (row_var_sum / rows, square_sum / (rows * columns)),
            }
            self._new = {
                name: torch.lerp(old, new + SQUARE_EPS, self._new_weight)
                for name, (old, new) in means.items()
            }
        for name, moment in self._moments.items():
            write_if(moment, self._new[name], accept)

    def sum_of_updates(self) -> Iterator[_Sum]:
        """The sum of the squares of the update, before it is clipped."""
        self._sums["update"] = self._unclipped().square().sum().view(1)
        yield (self._sums["update"], self._groups)

    def write_weight(self, accept: Tensor | None) -> None:
        elements, lr = self._shape.numel(), self._options["lr"]
        rms = (self._sums["update"] / elements).sqrt()
        factor = lr / (rms / self._options["clip_threshold"]).clamp(min=1)
        if self._options["scale_parameter"]:
            weight_rms = (self._sums["total"][:1] / elements).sqrt()
            factor = factor * weight_rms.clamp(min=MIN_WEIGHT_RMS)
        decayed = self._weight.float() * (1 - lr * self._options["weight_decay"])
        write_if(self._weight, decayed - factor * self._unclipped(), accept)

    def _unclipped(self) -> Tensor:
        """The gradient divided by the root of the second moment."""
        grad, new = self._grad.float(), self._new
        if not _is_factored(self._shape):
            return grad * new["variance"].rsqrt()
        rows = (new["row_var"] / new["mean"]).rsqrt()
        return grad * rows[:, None] * new["col_var"].rsqrt()[None, :]
