"""The true norm of the whole gradient, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.distributed.collectives import sum_over


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    pp: DeviceMesh | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm` (0: leave them).

    `parameters` are those of this rank's stages; the other ranks of `pp` have the others. The
    gradients are first divided by `scale`, which the loss was multiplied by.
    Returns the norm before, 0-d, the same on every rank, without waiting for it.
    """
    # torch computes a norm over one mesh; parts on other meshes, or on none, are squared and added.
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if scale != 1.0:
        for part in by_mesh.values():
            torch._foreach_mul_([p.grad for p in part], 1 / scale)
    squares = [_norm([p.grad for p in part]).square() for part in by_mesh.values()]
    square = torch.stack(squares).sum()
    norm = (square if pp is None else sum_over(pp, square)).sqrt()
    if max_norm > 0:
        for part in by_mesh.values():
            nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(gradients, 2.0)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
