"""FSDP2, applied in every layout and on one process too, where it only provides mixed precision.

So mixed precision means the same everywhere: weights are stored in the param dtype and used in the
compute dtype, and their gradients are reduced in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from titanlite.distributed.collectives import local_shard

REDUCE_DTYPE = torch.float32  # of gradients while they are reduced


@dataclass(frozen=True)
class FSDPPolicy:
    """Precision and memory options of `apply_fsdp`."""

    compute_dtype: torch.dtype  # of all-gathered weights
    reshard_after_forward: Literal["default", "always", "never"]
    # free gathered weights after forward; default: except the last group's, which backward
    # needs first
    offload: bool  # keep shards of weights, gradients and optimizer state in host memory


@dataclass(frozen=True)
class ExpertGroups:
    """FSDP groups inside of blocks: experts, which are sharded over other ranks than the rest."""

    mesh: DeviceMesh  # [shard] or [replicate, shard]
    of_block: Mapping[nn.Module, nn.Module]


def apply_fsdp(
    model: nn.Module,
    before: Sequence[nn.Module],
    blocks: Iterable[nn.Module],
    after: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: FSDPPolicy,
    experts: ExpertGroups,
) -> None:
    """Shard `before` as one group, each block, `after` as one group, then all remaining parameters.

    `mesh` is [shard] or [replicate, shard]. The experts of a block are a group of their own, if
    they are in `experts`.
    """
    offload_policy = OffloadPolicy()
    if policy.offload:
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    def shard(modules: nn.Module | list[nn.Module], frees: bool, mesh: DeviceMesh = mesh) -> None:
        fully_shard(
            modules,
            mesh=mesh,
            reshard_after_forward=frees,
            shard_placement_fn=partial(_place_shards, mesh),
            # RoPE's cosines and sines stay fp32; other inputs already have the compute dtype.
            mp_policy=MixedPrecisionPolicy(
                policy.compute_dtype, REDUCE_DTYPE, cast_forward_inputs=False
            ),
            offload_policy=offload_policy,
        )

    frees = policy.reshard_after_forward != "never"
    frees_last = policy.reshard_after_forward == "always"
    for inner in experts.of_block.values():
        shard(inner, frees, experts.mesh)
    groups = [list(group) for group in (before, *([block] for block in blocks)) if group]
    for group in groups:
        shard(group, frees)
    if after:
        groups.append(list(after))
        shard(groups[-1], frees_last)
    shard(model, frees_last)
    _disable_gradient_averaging(model, mesh, experts)
    _prefetch_next_group([group[0] for group in groups], experts.of_block)


def _place_shards(mesh: DeviceMesh, parameter: nn.Parameter) -> Shard | None:
    """Shard stacked experts [E, ...] by `sharded_dim_of_experts`; others by rows."""
    if parameter.dim() < 3:
        return None
    return Shard(sharded_dim_of_experts(local_shard(parameter).shape, mesh.size(mesh.ndim - 1)))


def sharded_dim_of_experts(shape: Sequence[int], ranks: int) -> int:
    """The first dimension that divides evenly; if there is none, the first.

    FSDP pads uneven shards: 2 experts over 8 ranks would be gathered as 8.
    """
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)


def _prefetch_next_group(
    modules: Sequence[nn.Module], inner: Mapping[nn.Module, nn.Module]
) -> None:
    """Start the all-gather of each group when the group before it starts to compute.

    In forward, FSDP2 would start it only after the host has launched all kernels of that group, so
    the GPU would wait if it has caught up with the host. A block's `inner` group is gathered with
    it. Inner groups prefetch nothing: where a block is recomputed, FSDP2 takes their second forward
    for another step's.
    """

    def with_inner(module: nn.Module) -> list[Any]:
        return [module, inner[module]] if module in inner else [module]

    for module, next_module in pairwise(modules):
        assert isinstance(module, FSDPModule) and isinstance(next_module, FSDPModule)
        module.set_modules_to_forward_prefetch(with_inner(next_module))
        next_module.set_modules_to_backward_prefetch(with_inner(module))


def _disable_gradient_averaging(model: nn.Module, mesh: DeviceMesh, experts: ExpertGroups) -> None:
    """Sum gradients over ranks: the loss is already divided by the tokens of the global batch."""
    inner = set(experts.of_block.values())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also scales
            own = experts.mesh if module in inner else mesh
            # a factor for one rank would cost torch before 2.15 a second gradient
            if own.size() > 1:
                module.set_gradient_divide_factor(1.0)


def accumulate_gradients(model: nn.Module) -> None:
    """Add gradients that are still in the compute dtype to their sums in the reduce dtype.

    FSDP2 does so in its post-backward hook, which the second half of a split backward does not
    always reach: the gradients of the next micro-batch would be added in the compute dtype. Since
    torch 2.15 autograd itself accumulates in the reduce dtype (`grad_dtype`).
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Private, but what torch's own pipeline stage uses to reduce; a list since torch 2.13.
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (p for group in groups if group for p in group.fsdp_params):
            if hasattr(parameter, "unsharded_grad_dtype"):  # torch 2.15
                continue
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
