"""Starting weights that do not know how the model is spread.

Each parameter's values are a function of (seed, name, shape). A matrix is drawn in blocks of rows,
each from a generator of its own, so that a rank draws only the blocks that its shard touches, and
every layout on one kind of device starts from the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.errors import ConfigError
from titanlite.models import first_match

STANDARD_DEVIATION = 0.02  # as GPT-2 and most since; cut off at three of them
BLOCK_VALUES = 1 << 16  # values in one block of rows; part of what a seed means


def tie_parameters(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
    """Make each (name, other) one parameter again, after something made a new one in each module."""
    for name, other in pairs:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, model.get_parameter(other))


@torch.no_grad()
def init_weights(model: nn.Module, start: Mapping[str, str], depth: int, seed: int) -> None:
    """Fill every parameter by the word that `start` has for its name."""
    spread = {"normal": STANDARD_DEVIATION, "residual": STANDARD_DEVIATION / math.sqrt(2 * depth)}
    for name, parameter in model.named_parameters():
        word = first_match(start, name)
        if word == "ones":
            parameter.fill_(1.0)
        elif word in spread:
            _draw(parameter, name, seed, spread[word])
        else:
            raise ConfigError(f"parameter {name}: the family does not say how it starts ({word}).")


def _draw(parameter: Tensor, name: str, seed: int, deviation: float) -> None:
    """Fill the local part of a parameter from the generators of the row blocks it touches."""
    local, (first_row, *offsets) = _local_part(parameter)
    if local.numel() == 0:
        return
    rows, *rest = parameter.shape
    block_rows = max(1, BLOCK_VALUES // math.prod(rest))
    cut = tuple(slice(o, o + n) for o, n in zip(offsets, local.shape[1:], strict=True))
    end_row = first_row + local.shape[0]
    for block in range(first_row // block_rows, (end_row - 1) // block_rows + 1):
        top, bottom = block * block_rows, min((block + 1) * block_rows, rows)
        generator = torch.Generator(local.device).manual_seed(seed_of(seed, name, block))
        values = torch.empty((bottom - top, *rest), device=local.device)
        values.normal_(0.0, deviation, generator=generator)
        values.clamp_(-3 * deviation, 3 * deviation)
        mine = slice(max(top, first_row), min(bottom, end_row))
        local[mine.start - first_row : mine.stop - first_row] = values[
            (slice(mine.start - top, mine.stop - top), *cut)
        ]


def seed_of(seed: int, name: str, block: int) -> int:
    """63 bits that depend on all three and look unrelated for any two of them."""
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a parameter that this rank holds, and where it begins in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter, (0,) * parameter.dim()
    # Private, but the only function that knows where uneven and strided shards lie (2.11 to 2.15).
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), tuple(offset)
