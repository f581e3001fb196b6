"""Copies of a state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from titanlite.checkpoint.model_state import State
from titanlite.distributed.host_memory import HostMemory, PinnedMemory
from titanlite.distributed.tensors import local_shard

_ALIGNMENT = 64  # bytes: of a CPU cache line, and of torch's own allocations


class HostStaging:
    """Copies a state into the same host memory every time.

    Allocating memory takes longer than the copy, because the kernel clears it page by page. With
    `pinned`, a CUDA device copies asynchronously, in the order of its stream: before any kernel
    that is enqueued later.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self._memory: HostMemory | None = None
        self._copies: State = {}

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """Copy the state; before the copy is read, call the result of `wait_function`.

        Raises UserError if the memory cannot be pinned.
        """
        if _layout(state) != _layout(self._copies):
            self._copies = {}  # lets `_allocate` free their memory
            self._copies = self._allocate(state)
        for part, name, value in _entries(state):
            copy = local_shard(self._copies[part][name])
            copy.copy_(local_shard(value.detach()), non_blocking=self.pinned)
        return self._copies

    def wait_function(self) -> Callable[[], None]:
        """A function that waits, from any thread, until the copies made so far are complete."""
        if not (self.pinned and torch.cuda.is_initialized()):
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _allocate(self, state: State) -> State:
        """Tensors like those of the state, in host memory, which is replaced if it is too small.

        So the last save, perhaps in another dtype or without the optimizer state, pins no memory.
        """
        sizes = [local_shard(value).nbytes for _, _, value in _entries(state)]
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        needed = max(ends, default=0) or _ALIGNMENT  # not 0, which mmap refuses
        if self._memory is None or len(self._memory) < needed:
            self._memory = None
            self._memory = self._new_memory(needed)
        copies: State = {part: {} for part in state}
        for (part, name, value), offset in zip(_entries(state), [0, *ends], strict=False):
            copy = copies[part][name] = torch.empty_like(value.detach(), device="cpu")
            self._memory.place(copy, offset)
        return copies

    def _new_memory(self, nbytes: int) -> HostMemory:
        if self.pinned and torch.cuda.is_initialized():
            return PinnedMemory(nbytes, 'checkpoint.async_mode = "async"')
        return HostMemory(nbytes)


def _entries(state: State) -> Iterator[tuple[str, str, Tensor]]:
    for part, tensors in state.items():
        for name, value in tensors.items():
            yield part, name, value


def _layout(state: State) -> list[tuple[str, str, torch.Size, torch.dtype]]:
    return [(part, name, value.shape, value.dtype) for part, name, value in _entries(state)]
