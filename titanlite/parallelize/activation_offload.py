"""Activation offload: copy what blocks save for backward to host memory, and prefetch it.

The copy to the host overlaps with the forward of the next block, the copy back with the backward
of the block after, so a GPU with a fast bus hides both. At most two blocks' activations are on the
device.
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

MIN_BYTES = 1 << 20  # smaller tensors stay on the device: not worth a copy
BLOCKS_ON_DEVICE = 2  # the block that runs, and the previous one, whose copies overlap with it


def offload_activations(blocks: nn.ModuleDict, device_type: str) -> None:
    """Offload what each block saves for backward; the last two blocks' tensors stay on device."""
    transfers = _CudaTransfers() if device_type == "cuda" else _HostTransfers()
    queue = _OffloadQueue(transfers)
    for number, block in enumerate(blocks.values()):
        block.forward = partial(_offloaded_forward, block.forward, block, queue, number == 0)


class _CudaTransfers:
    """Copies through pinned memory, on one CUDA stream per direction.

    Device memory is always allocated on the compute stream, which waits for the copies before the
    memory is reused. Otherwise the allocator could not give it to the next block while the host
    runs ahead of the device.
    """

    def __init__(self):
        self._to_host, self._to_device = torch.cuda.Stream(), torch.cuda.Stream()

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start a copy to pinned memory; return it."""
        host = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, pin_memory=True
        )
        self._to_host.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._to_host):
            host.copy_(tensor, non_blocking=True)
        return host

    def record_sent(self) -> torch.cuda.Event | None:
        """Event after all copies to the host so far."""
        return self._to_host.record_event()

    def to_device(
        self, host: Tensor, device: torch.device
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start a copy to the device; return (copy, event when it is complete)."""
        copy = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
        self._to_device.wait_stream(torch.cuda.current_stream())  # last user of this memory
        self._to_device.wait_stream(self._to_host)
        with torch.cuda.stream(self._to_device):
            copy.copy_(host, non_blocking=True)
            return copy, self._to_device.record_event()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for `event`."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


class _HostTransfers:
    """The same for a model on the CPU: one copy, which is also the device copy; no waiting."""

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        return host.copy_(tensor)

    def record_sent(self) -> torch.cuda.Event | None:
        return None

    def to_device(
        self, host: Tensor, device: torch.device
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        return host, None

    def wait(self, event: torch.cuda.Event | None) -> None:
        pass


_Transfers = _CudaTransfers | _HostTransfers


class _OffloadedTensor:
    """A saved tensor on the host, and on the device before it is sent and after it is fetched."""

    def __init__(self, tensor: Tensor, transfers: _Transfers):
        self._transfers = transfers
        self._host = transfers.to_host(tensor)
        self._on_device: Tensor | None = tensor
        self._device = tensor.device
        self._is_fetched: torch.cuda.Event | None = None

    def free_device_copy(self) -> None:
        """Drop the device copy; the copy to the host must be complete."""
        self._on_device = None

    def fetch(self) -> None:
        """Start the copy back, unless the device copy is still or already there."""
        if self._on_device is None:
            self._on_device, self._is_fetched = self._transfers.to_device(self._host, self._device)

    def wait(self) -> Tensor:
        """The device copy, once it is complete."""
        self.fetch()
        self._transfers.wait(self._is_fetched)
        assert self._on_device is not None
        return self._on_device


@dataclass
class _BlockActivations:
    """Tensors saved by one forward of one block; freed with its autograd graph."""

    previous: _BlockActivations | None  # those of the block before, whose backward runs next
    tensors: dict[tuple, _OffloadedTensor] = field(default_factory=dict)  # by device memory range
    sent: torch.cuda.Event | None = None  # when all are copied to the host

    def finish_forward(self, sent: torch.cuda.Event | None) -> None:
        self.sent = sent

    def free_device_copies(self, transfers: _Transfers) -> None:
        transfers.wait(self.sent)
        for tensor in self.tensors.values():
            tensor.free_device_copy()

    def fetch(self) -> None:
        """Start the copies back of this block and the previous one."""
        for block in (self, self.previous):
            for tensor in block.tensors.values() if block else ():
                tensor.fetch()


class _OffloadQueue:
    """The most recent block forwards of a model, in execution order."""

    def __init__(self, transfers: _Transfers):
        self.transfers = transfers
        self._last: Callable[[], _BlockActivations | None] = lambda: None
        self._recent: deque[Callable[[], _BlockActivations | None]] = deque()

    def begin_forward(self, first: bool) -> _BlockActivations:
        """Start a block's forward; free the device copies of the block before the previous one."""
        activations = _BlockActivations(None if first else self._last())
        self._last = weakref.ref(activations)
        self._recent.append(self._last)
        if len(self._recent) > BLOCKS_ON_DEVICE:
            oldest = self._recent.popleft()()
            if oldest is not None:
                oldest.free_device_copies(self.transfers)
        return activations


def _offloaded_forward(forward, block: nn.Module, queue: _OffloadQueue, first: bool, *inputs):
    """Run `forward`, and offload the large tensors that it saves for backward."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    transfers, activations = queue.transfers, queue.begin_forward(first)
    # Not offloaded: weights, which FSDP frees and gathers again, and inputs without a gradient,
    # such as the RoPE table, which all blocks use.
    constants = (x for x in tree_leaves(inputs) if isinstance(x, Tensor) and not x.requires_grad)
    resident = {_storage_pointer(tensor) for tensor in (*block.parameters(), *constants)}

    @torch.no_grad()
    def pack(tensor: Tensor):
        local = local_shard(tensor)
        pointer = _storage_pointer(tensor)
        if pointer in resident or local.numel() * local.element_size() < MIN_BYTES:
            return tensor
        # Several operations may save the same tensor, which is alive here: one copy for all.
        key = (pointer, local.storage_offset(), local.shape, local.stride(), local.dtype)
        if key not in activations.tensors:
            activations.tensors[key] = _OffloadedTensor(local, transfers)
        dtensor_spec = None
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            dtensor_spec = (mesh, placements, tensor.shape, tensor.stride())
        return activations.tensors[key], dtensor_spec

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        offloaded, dtensor_spec = packed
        activations.fetch()
        local = offloaded.wait()
        if dtensor_spec is None:
            return local
        mesh, placements, shape, stride = dtensor_spec
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)

    with saved_tensors_hooks(pack, unpack):
        out = forward(*inputs)
    activations.finish_forward(transfers.record_sent())
    return out


def _storage_pointer(tensor: Tensor) -> int:
    return local_shard(tensor).untyped_storage().data_ptr()
