"""Weight initialisation that does not depend on the layout.

The values of each parameter are a function of (seed, name, shape). A matrix is drawn in blocks of
rows, each from its own generator, so that a rank draws only the blocks that its shard touches, and
every layout on one kind of device starts from the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.collectives import local_shard, shard_region
from titanlite.errors import ConfigError
from titanlite.models import ModelSizes, ModelSpec, first_match
from titanlite.models.mup import WidthScale
from titanlite.models.router import find_routers

BLOCK_VALUES = 1 << 16  # values in one block of rows; changing it changes the weights of every seed

INIT_ROLE_NAMES = (  # of parameters, in ModelSpec.init_roles
    "normal",
    "residual",  # layers that write to the residual: scaled down by depth
    "ones",
    "zeros",
    "decay",  # logarithm of the rate at which a head of linear attention forgets
    "adapter",  # the first matrix of an adapter, by its width
)
ADAPTER_ROLES = {"*.lora_a": "adapter", "*.lora_b": "zeros"}  # of every family
EMBEDDING = "tok_embeddings.weight"
SCALED_BY_BLOCK = ("*.wo.weight", "*.w[23]*", "*.router.gate.weight")  # in torchtitan


class Normal(NamedTuple):
    """A normal distribution around 0, and what becomes of values beyond three deviations."""

    std: float
    tails: Literal["clamped", "redrawn", "kept"] = "clamped"


@torch.no_grad()
def init_weights(
    model: nn.Module,
    spec: ModelSpec,
    sizes: ModelSizes,
    seed: int,
    widths: Mapping[str, WidthScale] | None = None,
    like_torchtitan: bool = False,
) -> None:
    """Fill every parameter by the first pattern in `spec.init_roles` that matches its name, and set
    the buffers of routers to those of a new run.

    `widths`: the muP scale of each parameter, by name; empty or None: no scaling.
    `like_torchtitan`: torchtitan's distributions for all but gains and biases. Raises ConfigError
    for a parameter whose role is missing or unknown.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue  # quantised, from a checkpoint
        role = first_match({**ADAPTER_ROLES, **spec.init_roles}, name)
        factor = widths[name].init_factor if widths else 1.0
        if role not in INIT_ROLE_NAMES:
            shown = "no initialisation role" if role is None else f'the unknown role "{role}"'
            raise ConfigError(
                f"parameter {name}: the model family gives it {shown}.",
                fix=f"Use one of {', '.join(INIT_ROLE_NAMES)}.",
            )
        if role == "ones":
            parameter.fill_(factor)
        elif role == "zeros":
            parameter.zero_()
        elif role == "decay":
            _fill_normal(parameter, name, seed, Normal(1.0, "kept"))
            _to_log_of_uniform(local_shard(parameter), 16.0)
        elif role == "adapter":  # with the variance of peft's uniform distribution
            _fill_normal(parameter, name, seed, Normal((3 * parameter.shape[1]) ** -0.5))
        elif like_torchtitan:
            _fill_normal(parameter, name, seed, _torchtitan_normal(name, spec, sizes))
        else:
            depth = 2 * sizes.n_layers if role == "residual" else 1
            _fill_normal(parameter, name, seed, Normal(spec.init_std / math.sqrt(depth) * factor))
    for router in find_routers(model):
        router.init_buffers()


def _torchtitan_normal(name: str, spec: ModelSpec, sizes: ModelSizes) -> Normal:
    """The distribution of a parameter in torchtitan, where tied embeddings are drawn as the output.

    torchtitan v0.2.2: init_weights in models/*/model/model.py and models/moe/moe.py.
    """
    if name == "output.weight" or (name == EMBEDDING and spec.tied_parameters(sizes)):
        return Normal(sizes.dim**-0.5, "redrawn")
    if name == EMBEDDING:
        return Normal(1.0, "kept")
    std = 0.02
    if any(fnmatchcase(name, pattern) for pattern in SCALED_BY_BLOCK):
        std /= math.sqrt(2 * (int(name.split(".")[1]) + 1))
    return Normal(std, "kept")


def _fill_normal(parameter: Tensor, name: str, seed: int, normal: Normal) -> None:
    """Fill the local shard of a parameter from the generators of the row blocks it touches."""
    local, (first_row, *offsets) = _local_shard_and_offset(parameter)
    if local.numel() == 0:
        return
    rows, *row_shape = parameter.shape
    block_rows = max(1, BLOCK_VALUES // math.prod(row_shape))
    columns = [slice(o, o + n) for o, n in zip(offsets, local.shape[1:], strict=True)]
    end_row = first_row + local.shape[0]
    for block in range(first_row // block_rows, (end_row - 1) // block_rows + 1):
        top, bottom = block * block_rows, min((block + 1) * block_rows, rows)
        generator = torch.Generator(local.device).manual_seed(_block_seed(seed, name, block))
        values = torch.empty((bottom - top, *row_shape), device=local.device)
        limit = 3 * normal.std
        if normal.tails == "redrawn":
            nn.init.trunc_normal_(values, 0.0, normal.std, -limit, limit, generator)
        else:
            values.normal_(0.0, normal.std, generator=generator)
        if normal.tails == "clamped":
            values.clamp_(-limit, limit)
        start, stop = max(top, first_row), min(bottom, end_row)  # rows of this block in the shard
        shard_in_block = (slice(start - top, stop - top), *columns)
        local[start - first_row : stop - first_row] = values[shard_in_block]


def _to_log_of_uniform(normal: Tensor, highest: float) -> None:
    """Replace standard normal values by logarithms of values that are uniform up to `highest`.

    At least 0.01, as in transformers' Qwen3-Next.
    """
    normal.mul_(0.5**0.5).erf_().add_(1).mul_(highest / 2).clamp_(min=0.01).log_()


def _block_seed(seed: int, name: str, block: int) -> int:
    """63-bit hash of the seed, the parameter's name and the block's number."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _local_shard_and_offset(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """(this rank's shard, index of its first element in the full tensor)."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    own = parameter.device_mesh.get_coordinate()
    assert own is not None, "this rank is not in the mesh of the parameter"
    return parameter.to_local(), shard_region(parameter, own)[1]
