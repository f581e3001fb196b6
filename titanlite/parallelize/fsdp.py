"""FSDP2 in every layout, one process included: it is also what makes mixed precision mean the
same everywhere, with parameters computed in one type and kept and reduced in another."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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


def apply_fsdp(
    model: nn.Module,
    before: list[nn.Module],
    blocks: Iterable[nn.Module],
    after: list[nn.Module],
    mesh: DeviceMesh,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    reshard: str,
    offload: bool,
) -> None:
    """Shard what is before the blocks together, each block, what is after them, then what is left.

    `mesh` [shard] or [replicate, shard]. `reshard` is always, never or default: free a group's
    gathered weights after forward, but not the last one's, which backward needs at once.
    """
    options = {
        "mesh": mesh,
        # The rotary table is fp32 on purpose, and everything else is already in `compute`.
        "mp_policy": MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
        "offload_policy": _offload_policy(offload, mesh.device_type),
    }
    groups = [group for group in (before, *([block] for block in blocks), after) if group]
    for group in groups:
        keep = reshard == "never" or (reshard == "default" and group is after)
        fully_shard(group, reshard_after_forward=not keep, **options)
    fully_shard(model, reshard_after_forward=reshard == "always", **options)
    _sum_gradients(model)
    _gather_ahead([group[0] for group in groups])


def _gather_ahead(modules: list[FSDPModule]) -> None:
    """Begin to gather the weights of a group when the one before it begins to compute.

    In forward torch would do so only when it is done, and so wait for the host between the two.
    """
    for before, after in pairwise(modules):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _sum_gradients(model: nn.Module) -> None:
    # The loss is divided by the tokens of the whole batch, so gradients add up; nothing averages.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums


def _offload_policy(offload: bool, device_type: str) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()


def reduce_gradients(model: FSDPModule, now: bool) -> None:
    """Whether the next backward reduces its gradients, or lets them add up whole on each rank."""
    model.set_requires_gradient_sync(now)


def accumulate_gradients(model: nn.Module) -> None:
    """Add the gradients that are still in the compute dtype to their sums in the reduce dtype.

    FSDP does so where the backward of a module ends, and the second half of a backward that is
    split in two does not always pass there: the gradients of the next micro-batch would be added
    to them in the compute dtype.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        # Private, but what torch's own pipeline stage reduces by; a list since torch 2.13.
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (p for group in groups if group for p in group.fsdp_params):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
