"""Copies of a state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.checkpoint.model_state import State
from titanlite.distributed.tensors import local_shard, pin_in_place


class HostStaging:
    """Copies a state into the same host memory every time.

    Allocating memory takes longer than the copy, because the kernel clears it page by page. With
    `pinned`, a CUDA device copies asynchronously, in the order of its stream: before any kernel
    that is enqueued later.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self.copies: dict[str, Tensor] = {}

    def copy(self, state: State) -> State:
        """Copy the state; before the copy is read, call the result of `wait_function`."""
        return {
            part: {name: self._copy(f"{part}.{name}", value) for name, value in tensors.items()}
            for part, tensors in state.items()
        }

    def wait_function(self) -> Callable[[], None]:
        """A function that waits, from any thread, until the copies made so far are complete."""
        if not (self.pinned and torch.cuda.is_initialized()):
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _copy(self, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        copy = self.copies.get(name)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self.copies[name] = value.to("cpu", copy=True)
            if self.pinned and torch.cuda.is_initialized():
                pin_in_place(local_shard(copy))
        else:
            local_shard(copy).copy_(local_shard(value), non_blocking=self.pinned)
        return copy
