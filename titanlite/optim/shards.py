"""State like the shards of a parameter, and sums over all of its shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from titanlite.distributed.collectives import local_shard


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


def sum_over_shards(sums: Iterable[tuple[Tensor, Iterable[dist.ProcessGroup]]]) -> None:
    """Add, in place, the values of all ranks of a sum's groups: one all-reduce per group for all.

    `sums`: (sum over this rank's shard, groups that shard the summed dimensions).
    """
    by_group: dict[str, tuple[dist.ProcessGroup, list[Tensor]]] = {}
    for value, groups in sums:
        for group in groups:
            by_group.setdefault(group.group_name, (group, []))[1].append(value)
    for group, values in by_group.values():
        flat = torch.cat([value.reshape(-1) for value in values])
        dist.all_reduce(flat, group=group)
        for value, total in zip(values, flat.split([v.numel() for v in values]), strict=True):
            value.copy_(total.view_as(value))


def groups_that_shard(parameter: Tensor, dim: int | None = None) -> list[dist.ProcessGroup]:
    """The groups of the mesh dimensions that shard dimension `dim` of a parameter; None: any."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [
        mesh.get_group(mesh_dim)
        for mesh_dim, placement in enumerate(parameter.placements)
        if is_sharding(placement, dim) and mesh.size(mesh_dim) > 1
    ]


def is_sharding(placement: Placement, dim: int | None) -> bool:
    """Whether a placement shards dimension `dim`; None: any dimension."""
    if placement.is_replicate() or placement.is_partial():
        return False
    # _StridedShard, of rows that FSDP and TP both shard, is not a Shard since torch 2.11
    return dim is None or getattr(placement, "dim", None) == dim
