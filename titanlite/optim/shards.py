"""Local shards of optimizer state: allocation, and writes that a flag on the device decides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titanlite.distributed.collectives import local_shard


def write_if(target: Tensor, value: Tensor, accept: Tensor | None) -> None:
    """Copy `value` to `target`, unless `accept` [] is false; None: always.

    Not a multiplication by 0, because 0 times NaN is NaN.
    """
    target.copy_(value if accept is None else torch.where(accept, value.to(target.dtype), target))


def sharded_zeros(
    parameter: Tensor,
    dtype: torch.dtype,
    *,
    shape: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """Zeros on the device and the mesh of a parameter; by default with its shape and placements."""
    local = local_shard(parameter)
    zeros = torch.zeros(local_shape or local.shape, dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size(parameter.shape if shape is None else shape)
    distributed = DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements if placements is None else placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return distributed.to(local.device)  # from_local has moved it to the device of the mesh
