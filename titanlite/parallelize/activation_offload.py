"""Activation offload: copy what blocks save for backward to host memory or a disk, and prefetch it.

While a block runs forward, the tensors of the block before are copied to the host; while it runs
backward, those of the block before are copied back. So a GPU with a fast bus hides both, and two
blocks' activations are on the device. The last two blocks are copied only if another forward
follows before their backward, as in pipelines; then those of three are there for a moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.disk_memory import DiskFile, DiskThread, bytes_of, in_pages
from titanlite.kernels.documents import DocumentIndex

MIN_BYTES = 1 << 20  # smaller tensors stay on the device: not worth a copy
_Event = torch.cuda.Event | Future[None] | None


def offload_activations(blocks: nn.ModuleDict, device_type: str, folder: str = "") -> None:
    """Offload what each block saves for backward, except what backward needs immediately.

    To `folder` on a disk, or to host memory. Raises UserError if the folder cannot be used.
    """
    transfers = _DiskTransfers(folder, device_type) if folder else _Transfers(device_type)
    queue = _OffloadQueue(transfers)
    last = len(blocks) - 1
    for number, block in enumerate(blocks.values()):
        begin = partial(queue.begin_forward, first=number == 0, last=number == last)
        block.forward = partial(_offloaded_forward, block.forward, block, begin)


class _Transfers:
    """Copies between the device and pinned host memory, on one CUDA stream per direction.

    Device memory is always allocated on the compute stream, which waits for the copies before the
    memory is freed. Otherwise the allocator could not give it to the next block while the host
    runs ahead of the device. The streams of a CPU do nothing, and have no events: None.
    """

    def __init__(self, device_type: str):
        self._device: Any = torch.get_device_module(device_type)
        self._pins = device_type == "cuda"
        self._to_host, self._to_device = self._device.Stream(), self._device.Stream()
        self._compute = self._device.current_stream()

    def to_host(self, tensors: list[Tensor]) -> tuple[list[Tensor], _Event]:
        """Start copies to pinned memory; return (copies, event when all are complete)."""
        hosts = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, pin_memory=self._pins)
            for t in tensors
        ]
        # For `wait`: autograd runs backward on this stream too, but may free tensors in any thread.
        self._compute = self._device.current_stream()
        self._to_host.wait_stream(self._compute)  # which has written the tensors
        with self._device.stream(self._to_host):
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
        return hosts, self._to_host.record_event()

    def to_device(
        self, hosts: list[Tensor], devices: list[torch.device], sent: _Event
    ) -> tuple[list[Tensor], list[_Event]]:
        """Start copies to the device; return (copies, event when each is complete).

        `sent` is the event of `to_host`. Waiting for its stream would take longer: it also has the
        copies of later blocks. The first tensor is copied last, because backward needs it last.
        """
        copies = [
            torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
            for host, device in zip(hosts, devices, strict=True)
        ]
        self._to_device.wait_stream(self._compute)  # which has used this memory for other tensors
        if sent is not None:
            self._to_device.wait_event(sent)
        fetched: list[_Event] = []
        with self._device.stream(self._to_device):
            for copy, host in zip(reversed(copies), reversed(hosts), strict=True):
                copy.copy_(host, non_blocking=True)
                fetched.insert(0, self._to_device.record_event())
        return copies, fetched

    def wait(self, event: _Event) -> None:
        """Make the compute stream wait for `event`."""
        if event is not None:
            self._compute.wait_event(event)


class _DiskTransfers:
    """`_Transfers` to a file for each block, which ends with the block's activations.

    The host waits for a transfer where otherwise the compute stream would.
    """

    def __init__(self, folder: str, device_type: str):
        self._folder, self._disk = folder, DiskThread(folder, device_type, "activations")

    def to_host(self, tensors: list[Tensor]) -> tuple[list[Any], _Event]:
        sizes = [in_pages(len(bytes_of(t))) for t in tensors]
        *offsets, total = accumulate(sizes, initial=0)
        file, parts = DiskFile(self._folder, total), list(zip(offsets, tensors, strict=True))
        stored = [
            (file, at, partial(torch.empty_strided, t.size(), t.stride(), dtype=t.dtype))
            for at, t in parts
        ]
        return stored, self._disk.transfer(file, parts, writes=True)

    def to_device(
        self, hosts: list[Any], devices: list[torch.device], _sent: _Event
    ) -> tuple[list[Tensor], list[_Event]]:
        copies: list[Tensor] = []
        fetched: list[_Event] = []
        for (file, offset, allocate), device in zip(
            reversed(hosts), reversed(devices), strict=True
        ):
            copies.insert(0, allocate(device=device))
            fetched.insert(0, self._disk.transfer(file, [(offset, copies[0])], writes=False))
        return copies, fetched

    def wait(self, event: _Event) -> None:
        if isinstance(event, Future):
            event.result()


class _BlockActivations:
    """Tensors saved by one forward of one block; freed with its autograd graph.

    They are on the device, then perhaps sent to the host and freed on the device, then fetched.
    """

    def __init__(self, previous: _BlockActivations | None, transfers: _Transfers | _DiskTransfers):
        self._previous = previous  # of the block before, whose backward runs next
        self._transfers = transfers
        self._numbers: dict[tuple, int] = {}  # device memory range -> index in the lists
        self._on_device: list[Tensor] = []  # empty while they are only on the host
        self._on_host: list[Any] = []  # empty until they are sent
        self._devices: list[torch.device] = []
        self._sent: _Event = None  # when all are copied to the host
        self._fetched: list[_Event] = []  # when each is copied back
        self._last_copy: _Event = None  # when the last of all copies is complete

    def __del__(self) -> None:
        # What the compute stream runs next may get this memory, so all copies must be complete.
        # Backward may not have waited for them: it does not use every tensor, and it may have used
        # one on the device while the copy to the host was still running.
        self._transfers.wait(self._last_copy)

    def add(self, memory_range: tuple, tensor: Tensor) -> int:
        """Store a tensor, once for each memory range; return its number."""
        if memory_range not in self._numbers:
            self._numbers[memory_range] = len(self._on_device)
            self._on_device.append(tensor)
        return self._numbers[memory_range]

    def send(self) -> None:
        """Start the copies to the host."""
        if self._on_device:
            self._on_host, self._sent = self._transfers.to_host(self._on_device)
            self._last_copy = self._sent

    def free_device_copies(self) -> None:
        """Free the device memory, after the copies to the host."""
        self._transfers.wait(self._sent)
        self._devices = [tensor.device for tensor in self._on_device]
        self._on_device = []

    def fetch(self) -> None:
        """Start the copies back, unless the tensors are still or already on the device."""
        if not self._on_device and self._on_host:
            self._on_device, self._fetched = self._transfers.to_device(
                self._on_host, self._devices, self._sent
            )
            self._last_copy = self._fetched[0]

    def get(self, number: int) -> Tensor:
        """A tensor on the device, for backward; prefetches those of the previous block."""
        self.fetch()
        if self._previous is not None:
            self._previous.fetch()
        if self._fetched:
            self._transfers.wait(self._fetched[number])
        return self._on_device[number]


_ActivationsRef = weakref.ReferenceType[_BlockActivations]


class _OffloadQueue:
    """The blocks of a model whose forward has run and whose tensors are on the device."""

    def __init__(self, transfers: _Transfers | _DiskTransfers):
        self._transfers = transfers
        self._waiting: list[_ActivationsRef] = []  # not sent; the newest is the last one
        self._sending: list[_ActivationsRef] = []

    def begin_forward(self, first: bool, last: bool) -> _BlockActivations:
        """Start the forward of a block: free the tensors that were sent, and send waiting ones.

        The tensors of the block before the last one wait until another forward begins.
        """
        for activations in _alive(self._sending):
            activations.free_device_copies()
        waiting = list(_alive(self._waiting))
        previous = waiting[-1] if waiting and not first else None
        to_send = [each for each in waiting if not (last and each is previous)]
        for activations in to_send:
            activations.send()
        started = _BlockActivations(previous, self._transfers)
        kept = [previous] if last and previous else []
        self._sending = [weakref.ref(each) for each in to_send]
        self._waiting = [weakref.ref(each) for each in (*kept, started)]
        return started


def _alive(references: list[_ActivationsRef]) -> Iterator[_BlockActivations]:
    """The activations that backward has not freed yet."""
    return (activations for each in references if (activations := each()) is not None)


def _offloaded_forward(
    forward, block: nn.Module, begin_forward: Callable[[], _BlockActivations], *inputs
):
    """Run `forward`, and offload the large tensors that it saves for backward."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    activations = begin_forward()
    # Not offloaded: weights, which FSDP frees and gathers again, and inputs without a gradient,
    # such as the cosines of RoPE or the index of the documents, which all blocks use.
    constants = (tensor for tensor in _tensors_in(inputs) if not tensor.requires_grad)
    resident = {_storage_pointer(tensor) for tensor in (*block.parameters(), *constants)}

    @torch.no_grad()
    def pack(tensor: Tensor):
        # Detached, because the autograd graph refers to `activations`: after a forward without a
        # backward, Python could not see the reference cycle.
        local = local_shard(tensor).detach()
        pointer = _storage_pointer(tensor)
        if pointer in resident or local.numel() * local.element_size() < MIN_BYTES:
            return tensor
        # Several operations may save the same tensor: one copy for all. During this forward,
        # `activations` keeps it alive, so no other tensor can get its memory range.
        memory_range = (pointer, local.storage_offset(), local.shape, local.stride(), local.dtype)
        number = activations.add(memory_range, local)
        if not isinstance(tensor, DTensor):
            return number, {}
        layout = {"device_mesh": tensor.device_mesh, "placements": tensor.placements}
        return number, {**layout, "shape": tensor.shape, "stride": tensor.stride()}

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, layout = packed
        local = activations.get(number)
        return DTensor.from_local(local, **layout) if layout else local

    with saved_tensors_hooks(pack, unpack):
        return forward(*inputs)


def _tensors_in(inputs: tuple) -> Iterator[Tensor]:
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, DocumentIndex):  # which is no container for torch
            yield from (leaf.on_host, leaf.on_device)
        elif isinstance(leaf, Tensor):
            yield leaf


def _storage_pointer(tensor: Tensor) -> int:
    return local_shard(tensor).untyped_storage().data_ptr()
