"""What blocks save for backward waits in host memory, and comes back before it is needed.

A copy out runs beside the block that follows, a copy in beside the backward of the block after, so
on a GPU with a fast bus both are hidden. At most two blocks' activations are on the device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanlite.distributed.tensors import local_shard

LEAST_BYTES = 1 << 20  # what is smaller is not worth a copy
STAY = 2  # blocks whose activations are still on the device: the one that runs, and the one before


def offload_activations(blocks: nn.ModuleDict, device_type: str) -> None:
    """Keep in host memory what blocks save; the last two have no time to leave, and stay."""
    travel = _OnCuda() if device_type == "cuda" else _OnHost()
    chain = _Chain(travel)
    for number, block in enumerate(blocks.values()):
        block.forward = partial(_offloaded, block.forward, block, chain, number == 0)


@dataclass
class _Away:
    """A saved tensor: in host memory, and before it has left or once it is fetched, here."""

    host: Tensor
    here: Tensor | None
    ready: object = None  # when it is here again


@dataclass
class _Group:
    """What one block saved in one forward; it lives as the graph does."""

    before: _Group | None  # whose backward comes after this one's
    kept: dict[tuple, _Away] = field(default_factory=dict)  # by where they were on the device
    left: object = None  # when all of it is in host memory


class _Chain:
    """The forwards of a model's blocks, in the order in which they run."""

    def __init__(self, travel):
        self.travel = travel
        self.last: Callable[[], _Group | None] = lambda: None
        self._recent: deque[Callable[[], _Group | None]] = deque()

    def begin(self, first: bool) -> _Group:
        """A block's forward begins; the one before the last has had its time to leave."""
        group = _Group(None if first else self.last())
        self.last = weakref.ref(group)
        self._recent.append(self.last)
        old = self._recent.popleft()() if len(self._recent) > STAY else None
        if old is not None:
            self.travel.wait(old.left)
            for away in old.kept.values():
                away.here = None
        return group


def _offloaded(forward, block: nn.Module, chain: _Chain, first: bool, *inputs):
    if not torch.is_grad_enabled():
        return forward(*inputs)
    travel, group = chain.travel, chain.begin(first)
    # FSDP frees gathered weights and gathers them again; rotary tables are every block's.
    constant = (x for x in tree_leaves(inputs) if isinstance(x, Tensor) and not x.requires_grad)
    stay = {local_shard(t).untyped_storage().data_ptr() for t in (*block.parameters(), *constant)}

    @torch.no_grad()
    def pack(tensor: Tensor):
        local = local_shard(tensor)
        storage = local.untyped_storage().data_ptr()
        if storage in stay or local.numel() * local.element_size() < LEAST_BYTES:
            return tensor
        place = (storage, local.storage_offset(), local.shape, local.stride(), local.dtype)
        if place not in group.kept:  # several operations save the same input, which is alive here
            group.kept[place] = _Away(travel.out(local), local)
        spread = None
        if isinstance(tensor, DTensor):
            spread = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return group.kept[place], local.device, spread

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        away, device, spread = packed
        for each in (group, group.before):
            for other in each.kept.values() if each else ():
                if other.here is None:
                    travel.come(other, device)
        local = travel.arrived(away)
        if spread is None:
            return local
        mesh, placements, shape, stride = spread
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)

    with saved_tensors_hooks(pack, unpack):
        out = forward(*inputs)
    group.left = travel.left()
    return out


class _OnCuda:
    """Through pinned memory, in a stream of its own for each direction.

    What is on the device belongs to the stream that computes, which waits where the others use its
    memory: else the allocator could not give it to the next block while the host runs ahead.
    """

    def __init__(self):
        self.leaving, self.coming = torch.cuda.Stream(), torch.cuda.Stream()

    def out(self, tensor: Tensor) -> Tensor:
        host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True
        )
        self.leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.leaving):
            host.copy_(tensor, non_blocking=True)
        return host

    def left(self) -> torch.cuda.Event:
        return self.leaving.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def come(self, away: _Away, device: torch.device) -> None:
        host = away.host
        away.here = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        self.coming.wait_stream(torch.cuda.current_stream())  # for who had this memory before
        self.coming.wait_stream(self.leaving)
        with torch.cuda.stream(self.coming):
            away.here.copy_(host, non_blocking=True)
            away.ready = self.coming.record_event()

    def arrived(self, away: _Away) -> Tensor:
        if away.ready is not None:
            self.wait(away.ready)
        return away.here


class _OnHost:
    """The same on a CPU, where both memories are one."""

    def out(self, tensor: Tensor) -> Tensor:
        host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        return host.copy_(tensor)

    def left(self) -> None:
        pass

    def wait(self, event: None) -> None:
        pass

    def come(self, away: _Away, device: torch.device) -> None:
        away.here = away.host

    def arrived(self, away: _Away) -> Tensor:
        return away.here
