"""FSDP2, which shards weights, and casts them to the compute dtype in every layout.

On one rank it is applied only to weights that it has to cast or move: it would copy all others, and
their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.mesh import FSDP_DIMENSIONS, Mesh
from titanlite.models.mtp import PredictionBlock

REDUCE_DTYPE = torch.float32  # of gradients while they are reduced


@dataclass(frozen=True)
class FSDPPolicy:
    """Precision and memory options of `apply_fsdp`."""

    compute_dtype: torch.dtype  # of all-gathered weights
    reshard_after_forward: Literal["default", "always", "never"]
    # free gathered weights after forward; default: not the last group's, which backward needs first
    offload: bool  # keep shards of weights, gradients and optimizer state in host memory


def apply_fsdp(
    model: nn.Module,
    before: Sequence[nn.Module],
    blocks: Iterable[nn.Module],
    after: Sequence[nn.Module],
    mesh: Mesh,
    policy: FSDPPolicy,
    experts: Mapping[nn.Module, nn.Module],
) -> None:
    """Shard `before` as one group, each block, `after` as one group, then all remaining parameters.

    `experts`: those of blocks that are sharded over ranks of their own, as groups of their own.
    Parameters that need not be sharded, moved or cast stay as they are, frozen ones each by itself.
    """

    def needs_fsdp(parameters: set[nn.Parameter], ranks: DeviceMesh) -> bool:
        casts = any(_is_cast(p, policy.compute_dtype) for p in parameters)
        return ranks.size() > 1 or policy.offload or casts

    of_experts = {p for module in experts.values() for p in module.parameters()}
    plain = set() if needs_fsdp(of_experts, mesh.experts.fsdp) else of_experts
    experts = {} if plain else experts
    plain |= {p for p in model.parameters() if not (p.requires_grad or needs_fsdp({p}, mesh.fsdp))}
    if not (experts or needs_fsdp(set(model.parameters()) - plain, mesh.fsdp)):
        return
    cuda = mesh.fsdp.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=cuda) if policy.offload else OffloadPolicy()
    frees_last = policy.reshard_after_forward == "always"
    # One rank casts weights once a step, not in each forward and backward.
    keeps = mesh.fsdp.size() * mesh.experts.fsdp.size() == 1 and not (policy.offload or frees_last)
    frees = policy.reshard_after_forward != "never" and not keeps

    def shard(modules: list[nn.Module], reshard: bool, ranks: DeviceMesh = mesh.fsdp) -> None:
        fully_shard(
            modules,
            mesh=ranks,
            reshard_after_forward=reshard,
            shard_placement_fn=partial(_place_shards, ranks),
            # RoPE's cosines and sines stay fp32; other inputs already have the compute dtype.
            mp_policy=MixedPrecisionPolicy(
                policy.compute_dtype, REDUCE_DTYPE, cast_forward_inputs=False
            ),
            offload_policy=offload,
            ignored_params=plain,
        )
        group: Any = modules[0]  # all have the same FSDP state
        group.set_reshard_after_backward(not keeps, recurse=False)
        # Gradients are summed: the loss is already divided by the tokens of the global batch.
        group.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also scales
        # a factor for one rank would cost torch before 2.15 a second gradient
        if ranks.size() > 1:
            group.set_gradient_divide_factor(1.0)

    for module in experts.values():
        shard([module], frees, mesh.experts.fsdp)
    groups = [list(group) for group in (before, *([block] for block in blocks), after) if group]
    for group in groups:
        shard(group, frees_last if group == list(after) else frees)
    shard([model], frees_last)
    _prefetch_next_group([[g[0], *(experts[m] for m in g if m in experts)] for g in groups])


def _is_cast(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether it is gathered in another dtype; `local_shard` would unwrap torchao's tensor."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    differs = parameter.is_floating_point() and parameter.dtype != dtype
    return differs or hasattr(local, "fsdp_pre_all_gather")


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


def _prefetch_next_group(groups: Sequence[list[Any]]) -> None:
    """Start the all-gather of each group when the group before it starts to compute.

    In forward, FSDP2 would start it only after the host has launched all kernels of that group, so
    the GPU would wait if it has caught up with the host. A group is a module, and the experts that
    are gathered with it. Experts prefetch nothing: where a block is recomputed, FSDP2 takes their
    second forward for another step's. Nor are prediction blocks prefetched: validation does not
    run them, and a block that is gathered for it would get out of date.
    """
    groups = [group for group in groups if not isinstance(group[0], PredictionBlock)]
    for group, next_group in pairwise(groups):
        group[0].set_modules_to_forward_prefetch(next_group)
        next_group[0].set_modules_to_backward_prefetch(group)


class GradientSums:
    """Gradients of several micro-batches, of parameters without FSDP, in the reduce dtype."""

    def __init__(self, models: Iterable[nn.Module]):
        self._completes = False  # whether the next backward makes the sums gradients
        self._sums: dict[nn.Parameter, Tensor | None] = {}
        for parameter in (p for model in models for p in model.parameters() if p.requires_grad):
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if mesh is None or FSDP_DIMENSIONS.isdisjoint(mesh.mesh_dim_names or ()):
                self._sums[parameter] = None
                parameter.register_post_accumulate_grad_hook(self._add)

    def begin_microbatch(self, model: nn.Module, completes: bool) -> None:
        """`completes`: its backward turns the sums into gradients; FSDP2 then reduces its own."""
        self._completes = completes
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(completes)

    @torch.no_grad()
    def _add(self, parameter: nn.Parameter) -> None:
        """Move a new gradient to the sum, or, if this backward completes it, the sum to `grad`."""
        grad, total = parameter.grad, self._sums[parameter]
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            # autograd of DTensor returns a sharded embedding's gradient for all token ids
            grad = parameter.grad = grad.redistribute(placements=parameter.placements)
        if grad is None or (self._completes and total is None):
            return
        total = grad.to(REDUCE_DTYPE) if total is None else total.add_(grad)
        done = total.to(parameter.dtype) if self._completes else None
        parameter.grad, self._sums[parameter] = done, None if self._completes else total

    def finish(self) -> None:
        """Turn the sums that are left into gradients."""
        for parameter, total in self._sums.items():
            if total is not None:
                parameter.grad, self._sums[parameter] = total.to(parameter.dtype), None

    def add_from(self, stage_module: nn.Module) -> None:
        """Add the gradients of a pipeline stage that are still in the compute dtype.

        The second half of a split backward calls no hook of a weight, and does not always reach
        FSDP2's post-backward hook: the gradients of the next micro-batch would be added in the
        compute dtype. Since torch 2.15 FSDP2 lets autograd sum in the reduce dtype (`grad_dtype`).
        """
        for plain in filter(self._sums.__contains__, stage_module.parameters()):
            self._add(plain)
        for module in (m for m in stage_module.modules() if isinstance(m, FSDPModule)):
            # Private, but what torch's own pipeline stage uses to reduce; a list since torch 2.13.
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (p for group in groups if group for p in group.fsdp_params):
                if not hasattr(parameter, "unsharded_grad_dtype"):  # before torch 2.15
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()
