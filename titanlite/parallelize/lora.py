"""Low-rank adapters of linear layers on a frozen model: LoRA (https://arxiv.org/abs/2106.09685).

A layer keeps its weight under its name, and gets the parameters lora_a [rank, in] and lora_b
[out, rank]. Published weights are therefore read as without adapters.

A quantised weight (QLoRA, https://arxiv.org/abs/2305.14314) is a matrix of bytes, sharded by the
rows and columns of the weight: of each row the codes, then an fp32 scale for each 64 values. In
torchao 0.18, Float8 weights cannot be sharded by FSDP2, int4 needs a GPU, and nf4 does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite.distributed.collectives import local_shard
from titanlite.models.moe import MixtureOfExperts
from titanlite.parallelize.compile import replace_forward
from titanlite.parallelize.tensor_styles import distribute_parameter, replicated_local
from titanlite.settings import NotNegative, Range

SCALED = 64  # values with one scale
CODEBOOKS = {  # the values of the codes of 4 bits
    "nf4": (  # appendix E of QLoRA
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "int4": tuple(value / 7 for value in range(-7, 8)),
}
ROW_BYTES = {"nf4": 36, "int4": 36, "float8": 68}  # of SCALED values with their scale
SHARDED: dict[str, Placement] = {"lora_a": Shard(1), "lora_b": Shard(0)}  # where the weight is, too


@dataclass(frozen=True)
class LoraConfig:
    """[lora] Train low-rank adapters of linear layers, and freeze all other weights."""

    rank: NotNegative = 0  # of the adapters; 0: none, train all weights
    alpha: Annotated[float, Range(0)] = 16.0  # alpha / rank multiplies what an adapter adds
    targets: list[str] = field(default_factory=list)
    # name patterns of the linear layers that get adapters, such as "layers.*.attention.w[qv]"
    base_dtype: Literal["bfloat16", "float8", "int4", "nf4"] | None = None
    # of the frozen weights; unset: training.dtype. The last three are of the targets, in blocks of
    # 64 values with one scale; all other frozen weights are then bfloat16

    @property
    def quantised(self) -> str | None:
        """The format of the targets' weights if they have codes."""
        return self.base_dtype if self.base_dtype in ROW_BYTES else None

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
        forward = type(layer).forward
        if config.quantised:
            width = layer.in_features // SCALED * ROW_BYTES[config.quantised]
            packed = torch.empty(layer.out_features, width, dtype=torch.uint8, device="meta")
            layer.weight = nn.Parameter(packed, requires_grad=False)
            if isinstance(weight, DTensor):
                distribute_parameter(layer, "weight", weight.device_mesh, weight.placements)
            forward = partial(_forward_quantised, config.quantised)
        replace_forward(layer, _add_adapter, forward, config.alpha / rank)


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


def _forward_quantised(quantised: str, layer: Any, x: Tensor) -> Tensor:
    """The output of a layer with a packed weight; in tensor parallelism, as of a plain one."""
    weight, local = layer.weight, x
    if isinstance(x, DTensor):
        placement = weight.placements[0]
        local = x.to_local(grad_placements=[Partial()] if placement == Shard(0) else None)
        placed = {Shard(0): Shard(x.dim() - 1), Shard(1): Partial()}.get(placement, Replicate())
    out = _QuantisedLinear.apply(local, local_shard(weight), quantised)
    if isinstance(x, DTensor):
        out = DTensor.from_local(out, x.device_mesh, [placed], run_check=False)
    elif isinstance(weight, DTensor) and layer.bias is not None:
        return out + replicated_local(layer.bias)
    return out if layer.bias is None else out + layer.bias


class _QuantisedLinear(torch.autograd.Function):
    """x [..., in] times a packed weight; backward unpacks it again, so that no copy is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, quantised: str) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.quantised = quantised
        return F.linear(x, unpack(packed, quantised, x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return grad @ unpack(packed, ctx.quantised, grad.dtype), None, None


def pack(weight: Tensor, quantised: str) -> Tensor:
    """The bytes [rows, bytes] of a weight [rows, columns]."""
    blocks = weight.float().unflatten(-1, (-1, SCALED))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if quantised == "float8":
        scale /= torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        book = torch.tensor(CODEBOOKS[quantised], device=weight.device)
        nearest = torch.bucketize(blocks / scale, (book[1:] + book[:-1]) / 2).to(torch.uint8)
        codes = nearest[..., ::2] * 16 + nearest[..., 1::2]
    return torch.cat((codes.flatten(-2), scale.squeeze(-1).view(torch.uint8)), -1)


def unpack(packed: Tensor, quantised: str, dtype: torch.dtype) -> Tensor:
    """The rounded weight [rows, columns] from its bytes."""
    scales = packed.shape[-1] // ROW_BYTES[quantised]  # of a row
    codes, scale = packed.split([packed.shape[-1] - 4 * scales, 4 * scales], -1)
    if quantised == "float8":
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        book = torch.tensor(CODEBOOKS[quantised], device=packed.device)
        values = book[torch.stack((codes >> 4, codes & 15), -1).int()].flatten(-2)
    factors = scale.contiguous().view(torch.float32).unsqueeze(-1)
    return (values.unflatten(-1, (scales, SCALED)) * factors).flatten(-2).to(dtype)


@contextmanager
def unpacked(weights: dict[str, Tensor], quantised: str | None) -> Iterator[None]:
    """In the block, packed weights are plain ones to be read into, in bf16, as models are
    published; then pack them. One rank's are in host memory, those that are sharded on its device.
    """
    packed = {n: w for n, w in weights.items() if quantised and w.dtype == torch.uint8}
    for name, weight in packed.items():
        local, factor = local_shard(weight), SCALED / ROW_BYTES[quantised or ""]
        shapes = [(w.shape[0], round(w.shape[1] * factor)) for w in (local, weight)]
        plain = torch.empty(shapes[0], dtype=torch.bfloat16)
        if isinstance(weight, DTensor):
            weights[name] = DTensor.from_local(
                plain.to(local.device),
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=torch.Size(shapes[1]),
                stride=(shapes[1][1], 1),
            )
        else:
            weights[name] = plain
    yield
    for name, weight in packed.items():
        local_shard(weight).copy_(pack(local_shard(weights[name]), quantised or ""))
