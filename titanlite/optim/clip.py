"""The norm of the whole gradient over all ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.tensors import local_shard


class GradNorms(NamedTuple):
    """2-norms of the gradient of one step, on the device and before clipping."""

    total: Tensor  # 0-d: of the whole gradient, the same on every rank
    own: Tensor  # [parameters of this rank]: of this rank's shards; 0 where there is no gradient


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    mesh: Mesh | None = None,
    scale: float = 1.0,
) -> GradNorms:
    """Scale all gradients so that their joint 2-norm is at most `max_norm` (0: leave them).

    `parameters` are those of this rank's stages. The gradients are first divided by `scale`, which
    the loss was multiplied by. Does not wait for the device.
    """
    parameters = list(parameters)
    there = [p.grad for p in parameters if p.grad is not None]
    local = [local_shard(gradient) for gradient in there]
    if scale != 1.0:
        torch._foreach_mul_(local, 1 / scale)
    norms = iter(shard_norms(there))
    found = [None if p.grad is None else next(norms) for p in parameters]
    total, own = combine_norms(parameters, found, mesh)
    if max_norm > 0:
        # The formula of torch.nn.utils.clip_grads_with_norm_, which dispatches DTensors one by one.
        torch._foreach_mul_(local, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return GradNorms(total, own)


@torch.no_grad()
def shard_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm in fp32, 0-d, of what this rank has of each gradient."""
    if not gradients:
        return []
    local = [local_shard(_summed_up(gradient)) for gradient in gradients]
    return list(torch._foreach_norm(local, 2.0, torch.float32))  # no public call takes many tensors


@torch.no_grad()
def combine_norms(
    parameters: Sequence[nn.Parameter], norms: Sequence[Tensor | None], mesh: Mesh | None = None
) -> GradNorms:
    """The norm over all ranks, from those of this rank's shards of the gradients of `parameters`.

    Every rank adds the squares of what it holds, divided by the number of ranks that hold the same:
    inf or NaN on any one rank makes the norm inf or NaN on all, even where the others have a copy
    that is finite.
    """
    ranks = 1 if mesh is None else mesh.degrees.ranks // mesh.pp.size()  # of one stage
    by_copies: dict[int, list[Tensor]] = {}
    for parameter, norm in zip(parameters, norms, strict=True):
        if norm is not None:
            by_copies.setdefault(ranks // _shards(parameter), []).append(norm)
    parts = [torch.stack(same).square().sum() / copies for copies, same in by_copies.items()]
    square = torch.stack(parts).sum()
    if mesh is not None:
        all_reduce_sum(mesh.tp, all_reduce_sum(mesh.loss, square))  # together these are all ranks
    zero = torch.zeros_like(square)
    return GradNorms(square.sqrt(), torch.stack([zero if n is None else n for n in norms]))


def _shards(tensor: Tensor) -> int:
    """How many ranks hold different parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


def _summed_up(gradient: Tensor) -> Tensor:
    """The same gradient, where each rank has only its summand of it yet."""
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
        return gradient.redistribute(placements=whole)
    return gradient
