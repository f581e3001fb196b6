"""Tied parameters under pipeline parallelism: one stage has the parameter, another one a copy.

A step begins with the parameter's values in the copy, and ends with the copy's gradient added to
the parameter's. Between the two, a copy is like any parameter of its stage. But it is not trained:
clipping, the optimizer, checks and checkpoints know the parameter only, as without stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import local_shard, receive_tensor, send_tensor
from titanlite.parallelize.pipeline_plan import PipelinePlan

TiedPairs = Sequence[tuple[str, str]]  # names of parameters: the first is tied to the second


def pairs_inside(model: nn.Module, pairs: TiedPairs) -> list[tuple[str, str]]:
    """The pairs of which both parameters are in a model or a stage of it."""
    return [pair for pair in pairs if all(_has_parameter(model, name) for name in pair)]


def _has_parameter(model: nn.Module, name: str) -> bool:
    return name.rpartition(".")[0] in dict(model.named_modules())


def tie_parameters(model: nn.Module, pairs: TiedPairs) -> None:
    """Make each pair (name, other) the same parameter; a transform may have replaced both."""
    for name, other in pairs:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, model.get_parameter(other))


class RankModel(nn.Module):
    """The modules of a pipeline rank, of a model whose tied parameters are in different stages.

    A tied parameter has both of its names in the `state_dict` of the rank that has it, and
    `named_parameters` yields it once, as without stages. Neither yields a copy. `copies`: pairs of
    which the first is no name of a parameter without stages.
    """

    def __init__(self, model: nn.Module, pairs: TiedPairs, copies: TiedPairs = ()):
        super().__init__()
        for name, module in model.named_children():
            self.add_module(name, module)
        self._pairs = list(pairs)
        both = [*pairs, *copies]
        self._copies = {name: other for name, other in both if _has_parameter(self, name)}
        self._second_names = {name for name, _ in pairs}

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in `nn.Module` without a prefix, without the copies."""
        named = super().named_parameters(*args, **options)
        return ((name, parameter) for name, parameter in named if name not in self._copies)

    def add_second_names(self) -> None:
        """Give each tied parameter of this rank its other name, if the copy is on another rank."""
        for name, other in self._pairs:
            if _has_parameter(self, other) and not _has_parameter(self, name):
                path, _, attribute = name.rpartition(".")
                holder = nn.Module()
                holder.register_parameter(attribute, self.get_parameter(other))
                self.add_module(path, holder)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """As named_parameters; has the parameter instead of its copy, which may be out of date."""
        state = super().state_dict(*args, **options)
        for name, other in self._copies.items():
            if other in state and name in self._second_names:
                state[name] = state[other]
            else:
                del state[name]
        return state


@dataclass(frozen=True)
class TiedCopy:
    """A tied parameter and its copy, each with the gradient of its stage."""

    pp: DeviceMesh
    parameter_rank: int  # pipeline rank
    copy_rank: int  # likewise; may be the same
    parameter: nn.Parameter | None  # None: on another rank
    copy: nn.Parameter | None  # None: on another rank

    @torch.no_grad()
    def update(self) -> None:
        """Set the copy to the parameter's values; both ranks must call it."""
        if self.parameter is not None and self.copy is not None:
            local_shard(self.copy).copy_(local_shard(self.parameter))
        elif self.parameter is not None:
            send_tensor(self.pp, local_shard(self.parameter), self.copy_rank)
        elif self.copy is not None:
            receive_tensor(self.pp, local_shard(self.copy), self.parameter_rank)

    @torch.no_grad()
    def reduce_gradient(self) -> None:
        """Add the copy's gradient to the parameter's, and free it; both ranks must call it."""
        if any(p is not None and not p.requires_grad for p in (self.parameter, self.copy)):
            return  # frozen
        if self.parameter is not None:
            total = local_shard(_gradient(self.parameter))
            if self.copy is not None:
                gradient = local_shard(_gradient(self.copy))
            else:
                gradient = torch.empty_like(total)
                receive_tensor(self.pp, gradient, self.copy_rank)
            total.add_(gradient)
        elif self.copy is not None:
            send_tensor(self.pp, local_shard(_gradient(self.copy)), self.parameter_rank)
        if self.copy is not None:
            self.copy.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "reduced before the backward of its stage"
    return parameter.grad


def build_tied_copies(
    stage_modules: Mapping[int, nn.Module], plan: PipelinePlan, pairs: TiedPairs, pp: DeviceMesh
) -> tuple[TiedCopy, ...]:
    """The copies of tied parameters that are in different stages, on any pipeline rank."""

    def parameter_here(stage: int, name: str) -> nn.Parameter | None:
        return stage_modules[stage].get_parameter(name) if stage in stage_modules else None

    copies = []
    for name, other in pairs:
        copy_stage, stage = plan.stage_of(name), plan.stage_of(other)
        if copy_stage != stage:
            parameters = parameter_here(stage, other), parameter_here(copy_stage, name)
            copies.append(TiedCopy(pp, plan.rank_of[stage], plan.rank_of[copy_stage], *parameters))
    return tuple(copies)
