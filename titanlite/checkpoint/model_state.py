"""The tensors of a model and its optimizer by name, and their copies in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.host_memory import HostMemory, PinnedMemory

State = dict[str, dict[str, Any]]  # "model", "optimizer" or AVERAGE -> name -> tensor
AVERAGE = "average"  # of the weights

# Flattened, so that optimizer state is keyed by parameter name, whatever its param groups are.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

_ALIGNMENT = 64  # bytes: of a CPU cache line, and of torch's own allocations


def model_and_optimizer_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] | None = None
) -> State:
    """The tensors themselves, not copies: to load a checkpoint is to read into them.

    Without frozen weights, which no checkpoint keeps.
    """
    frozen = frozen_weights(model).keys() - {name for name, _ in model.named_buffers()}
    weights = get_model_state_dict(model, options=_BY_NAME)
    state: State = {"model": {n: _unwrap(w) for n, w in weights.items() if n not in frozen}}
    if optimizers is not None:
        # Learning rates and weight decays come from the job: only optimizer state is saved. Missing
        # state (a fresh AdamW has none) is created by this call, so that it can be read into.
        full = get_optimizer_state_dict(model, tuple(optimizers), options=_BY_NAME)
        state["optimizer"] = {n: value for n, value in full.items() if n.startswith("state.")}
    return state


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a model with adapters is loaded from: all but those; empty if it trains all weights."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    if len(trained) == len(list(model.parameters())):
        return {}
    weights: dict[str, Any] = get_model_state_dict(model, options=_BY_NAME)
    return {name: weight for name, weight in weights.items() if name not in trained}


def _unwrap(weight: Any) -> Tensor:
    """A weight without the tensor subclass that wraps it for Float8, in the same memory."""
    assert isinstance(weight, Tensor)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if not is_traceable_wrapper_subclass(local):  # torch's own check, though not a public function
        return weight
    inner = local_shard(local)
    if not isinstance(weight, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


class HostStaging:
    """Copies a state into the same host memory every time.

    Allocating memory takes longer than the copy, because the kernel clears it page by page. With
    `pinned`, a CUDA device copies asynchronously, before any kernel that is enqueued later.
    """

    def __init__(self, pinned: bool):
        self.pinned = pinned
        self._memory: HostMemory | None = None
        self._copies: State = {}

    @torch.no_grad()
    def copy(self, state: State) -> State:
        """Copy the state; it may be read after the result of `wait_function`. Raises UserError."""
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
            if self.pinned and torch.cuda.is_initialized():
                self._memory = PinnedMemory(needed, 'checkpoint.async_mode = "async"')
            else:
                self._memory = HostMemory(needed)
        copies: State = {part: {} for part in state}
        for (part, name, value), offset in zip(_entries(state), [0, *ends], strict=False):
            copy = copies[part][name] = torch.empty_like(value.detach(), device="cpu")
            self._memory.place(copy, offset)
        return copies


def _entries(state: State) -> Iterator[tuple[str, str, Tensor]]:
    for part, tensors in state.items():
        for name, value in tensors.items():
            yield part, name, value


def _layout(state: State) -> list[tuple[str, str, torch.Size, torch.dtype]]:
    return [(part, name, value.shape, value.dtype) for part, name, value in _entries(state)]
