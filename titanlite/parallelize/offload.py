"""What blocks save for backward waits in host memory, and comes back before it is needed.

A copy out runs beside the blocks that follow, a copy in beside the backward of the block after, so
on a GPU with a fast bus both are hidden; at most two blocks' activations are on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 1 << 20  # what is smaller is not worth a copy


def offload_activations(blocks: nn.ModuleDict, device_type: str) -> None:
    """Keep what every block but the last saves in host memory; the last is needed at once."""
    travel = _OnCuda() if device_type == "cuda" else _OnHost()
    chain = _Chain()
    last = len(blocks) - 1
    for number, block in enumerate(blocks.values()):
        if number < last:
            block.forward = partial(
                _offloaded, block.forward, block, travel, chain, number == 0
            )


@dataclass
class _Chain:
    """The group of the block before, in the forward that runs now; it lives as its graph does."""

    end: Callable[[], _Group | None] = lambda: None


@dataclass
class _Group:
    """What one block saved in one forward."""

    before: _Group | None  # whose backward comes after this one's
    kept: dict[tuple, _Away] = field(default_factory=dict)  # by where they were on the device
    fetched: bool = False


@dataclass
class _Away:
    """A tensor in host memory, and once it is asked for, on the device."""

    host: Tensor
    back: Tensor | None = None
    ready: object = None


def _offloaded(forward, block: nn.Module, travel, chain: _Chain, first: bool, *inputs):
    if not torch.is_grad_enabled():
        return forward(*inputs)
    group = _Group(None if first else chain.end())
    chain.end = weakref.ref(group)
    # FSDP frees gathered weights and gathers them again; rotary tables are every block's.
    constant = (x for x in tree_leaves(inputs) if isinstance(x, Tensor) and not x.requires_grad)
    here: list[Tensor] = []  # copied already; alive, so that no other tensor takes their place
    stay = {_local(tensor).untyped_storage().data_ptr() for tensor in (*block.parameters(), *constant)}

    def pack(tensor: Tensor):
        local = _local(tensor)
        storage = local.untyped_storage().data_ptr()
        if storage in stay or local.numel() * local.element_size() < LEAST_BYTES:
            return tensor
        place = (storage, local.storage_offset(), local.shape, local.stride(), local.dtype)
        if place not in group.kept:  # several operations save the same input
            group.kept[place] = _Away(travel.out(local))
            here.append(local)
        spread = None
        if isinstance(tensor, DTensor):
            spread = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return group.kept[place], local.device, spread

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, device, spread = packed
        _fetch(group, travel, device)
        if group.before is not None:
            _fetch(group.before, travel, device)
        local = travel.arrived(away)
        if spread is None:
            return local
        mesh, placements, shape, stride = spread
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)

    with saved_tensors_hooks(pack, unpack):
        out = forward(*inputs)
    here.clear()
    return out


def _fetch(group: _Group, travel, device: torch.device) -> None:
    if not group.fetched:
        group.fetched = True
        for away in group.kept.values():
            travel.come(away, device)


def _local(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank behind another kind of one."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local if type(local) in (Tensor, nn.Parameter) else local.clone()  # still on its way


class _OnCuda:
    """Through pinned memory, in a stream of its own for each direction."""

    def __init__(self):
        self.leaving, self.coming = torch.cuda.Stream(), torch.cuda.Stream()

    def out(self, tensor: Tensor) -> Tensor:
        host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True
        )
        self.leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.leaving):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.leaving)  # its memory is not given away before it has left
        return host

    def come(self, away: _Away, device: torch.device) -> None:
        self.coming.wait_stream(self.leaving)
        with torch.cuda.stream(self.coming):
            away.back = torch.empty_strided(
                away.host.size(), away.host.stride(), dtype=away.host.dtype, device=device
            )
            away.back.copy_(away.host, non_blocking=True)
            away.ready = self.coming.record_event()

    def arrived(self, away: _Away) -> Tensor:
        here = torch.cuda.current_stream()
        here.wait_event(away.ready)
        away.back.record_stream(here)
        return away.back


class _OnHost:
    """The same on a CPU, where both memories are one."""

    def out(self, tensor: Tensor) -> Tensor:
        host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        return host.copy_(tensor)

    def come(self, away: _Away, device: torch.device) -> None:
        away.back = away.host

    def arrived(self, away: _Away) -> Tensor:
        return away.back
