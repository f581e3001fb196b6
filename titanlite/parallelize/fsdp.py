"""FSDP2, applied in every layout and on one process too, where it only provides mixed precision.

So mixed precision means the same everywhere: weights are stored in the param dtype and used in the
compute dtype, and their gradients are reduced in the reduce dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

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

ReshardAfterForward = Literal["default", "always", "never"]


@dataclass(frozen=True)
class FSDPPolicy:
    """Precision and memory options of `apply_fsdp`."""

    compute_dtype: torch.dtype  # of all-gathered weights
    reduce_dtype: torch.dtype  # of gradients while they are reduced
    reshard_after_forward: ReshardAfterForward = "default"
    # free gathered weights after forward; default: except the last group's, which backward
    # needs first
    offload: bool = False  # keep shards of weights, gradients and optimizer state in host memory


def apply_fsdp(
    model: nn.Module,
    before: Sequence[nn.Module],
    blocks: Iterable[nn.Module],
    after: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: FSDPPolicy,
) -> None:
    """Shard `before` as one group, each block, `after` as one group, then all remaining parameters.

    `mesh` is [shard] or [replicate, shard].
    """
    shard = partial(
        fully_shard,
        mesh=mesh,
        # RoPE's cosines and sines stay fp32; other inputs already have the compute dtype.
        mp_policy=MixedPrecisionPolicy(
            policy.compute_dtype, policy.reduce_dtype, cast_forward_inputs=False
        ),
        offload_policy=_offload_policy(policy.offload, mesh.device_type),
    )
    reshard = policy.reshard_after_forward
    groups = [list(group) for group in (before, *([block] for block in blocks)) if group]
    for group in groups:
        shard(group, reshard_after_forward=reshard != "never")
    if after:
        groups.append(list(after))
        shard(groups[-1], reshard_after_forward=reshard == "always")
    shard(model, reshard_after_forward=reshard == "always")
    _disable_gradient_averaging(model, mesh.size())
    _prefetch_next_group([group[0] for group in groups])


def _prefetch_next_group(modules: Sequence[nn.Module]) -> None:
    """Start the all-gather of each group when the group before it starts to compute.

    In forward, FSDP2 would start it only when that group is done, so the GPU would wait for the
    host between the two.
    """
    for module, next_module in pairwise(modules):
        assert isinstance(module, FSDPModule) and isinstance(next_module, FSDPModule)
        module.set_modules_to_forward_prefetch([next_module])
        next_module.set_modules_to_backward_prefetch([module])


def _disable_gradient_averaging(model: nn.Module, ranks: int) -> None:
    """Sum gradients over ranks: the loss is already divided by the tokens of the global batch."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also scales
            if ranks > 1:  # with one rank, torch before 2.15 allocates a second gradient for it
                module.set_gradient_divide_factor(1.0)


def _offload_policy(offload: bool, device_type: str) -> OffloadPolicy:
    return CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()


def set_gradient_reduction(model: nn.Module, enabled: bool) -> None:
    """Set whether the next backward reduces gradients, or accumulates them unsharded."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(enabled)


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
