"""Low-rank adapters of linear layers on a frozen model: LoRA (https://arxiv.org/abs/2106.09685).

A layer keeps its weight under its name, and gets the parameters lora_a [rank, in] and lora_b
[out, rank]. Published weights are therefore read as without adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite.models.moe import MixtureOfExperts
from titanlite.parallelize.compile import replace_forward
from titanlite.parallelize.tensor_styles import distribute_parameter, replicated_local
from titanlite.settings import NotNegative, Range

SHARDED: dict[str, Placement] = {"lora_a": Shard(1), "lora_b": Shard(0)}  # where the weight is, too


@dataclass(frozen=True)
class LoraConfig:
    """[lora] Train low-rank adapters of linear layers, and freeze all other weights."""

    rank: NotNegative = 0  # of the adapters; 0: none, train all weights
    alpha: Annotated[float, Range(0)] = 16.0  # alpha / rank multiplies what an adapter adds
    targets: list[str] = field(default_factory=list)
    # name patterns of the linear layers that get adapters, such as "layers.*.attention.w[qv]"
    base_dtype: Literal["bfloat16"] | None = None  # of the frozen weights; unset: training.dtype

    def select(self, model: nn.Module) -> list[str]:
        """Names of the layers of a plain model that get adapters."""
        layers = linear_layers(model) if self.rank else []
        return [n for n in layers if any(fnmatchcase(n, pattern) for pattern in self.targets)]

    def __str__(self) -> str:
        base = f", base {self.base_dtype}" if self.base_dtype else ""
        return f"rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}{base}"


def linear_layers(model: nn.Module) -> list[str]:
    """Names of the layers that can have adapters: not the output layer, routers and experts."""
    modules = dict(model.named_modules())
    experts = tuple(f"{n}." for n, m in modules.items() if isinstance(m, MixtureOfExperts))
    return [n for n, m in modules.items() if type(m) is nn.Linear and not n.startswith(experts)]


def add_adapters(
    model: nn.Module, layers: Sequence[str], config: LoraConfig, dtype: torch.dtype
) -> None:
    """Freeze a model on the meta device, and add adapters in `dtype`, sharded as the weights are.

    Column-parallel: A is replicated, and B sharded by rows. Row-parallel: A is sharded by columns,
    and B replicated. `layers`: names of linear layers, to which tensor parallelism is applied.
    """
    model.requires_grad_(False)
    for name in layers:
        layer: Any = model.get_submodule(name)
        weight, rank = layer.weight, config.rank
        for adapter, shape in zip(
            SHARDED, [(rank, layer.in_features), (layer.out_features, rank)], strict=True
        ):
            values = torch.empty(shape, dtype=dtype, device=weight.device)
            layer.register_parameter(adapter, nn.Parameter(values))
            if isinstance(weight, DTensor):
                same = weight.placements[0] == SHARDED[adapter]
                placement = SHARDED[adapter] if same else Replicate()
                distribute_parameter(layer, adapter, weight.device_mesh, [placement])
        replace_forward(layer, _add_adapter, type(layer).forward, config.alpha / rank)


def _add_adapter(layer: Any, forward: Callable[..., Tensor], scale: float, x: Tensor) -> Tensor:
    """The output of a layer plus that of its adapter, which is computed from local tensors.

    In tensor parallelism the output is sharded by features (column-parallel), or each rank has a
    summand of it (row-parallel), and its gradients of replicated tensors are summands.
    """
    if not isinstance(x, DTensor):
        a, b = (replicated_local(p) if isinstance(p, DTensor) else p for p in _adapter(layer))
        return forward(layer, x) + F.linear(F.linear(x, a) * scale, b)
    (placement,) = layer.weight.placements
    shared = not placement.is_replicate()  # whether the ranks have summands of gradients
    a, b = (
        replicated_local(p) if shared and p.placements[0].is_replicate() else p.to_local()
        for p in _adapter(layer)
    )
    local = x.to_local(grad_placements=[Partial()] if placement == Shard(0) else None)
    added = F.linear(F.linear(local, a) * scale, b)
    out = forward(layer, x)
    assert isinstance(out, DTensor)
    return out + DTensor.from_local(added, x.device_mesh, out.placements, run_check=False)


def _adapter(layer: Any) -> tuple[Any, Any]:
    return layer.lora_a, layer.lora_b
