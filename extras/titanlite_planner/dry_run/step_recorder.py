"""Record what a step of one rank allocates, computes and sends."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

SCALAR_BYTES = 64  # smaller are the loss, the norm of the gradient, handshakes: not counted
_FUNCTIONAL = "_c10d_functional"


@dataclass(frozen=True)
class CollectiveKind:
    """A type of collective on one dimension of the mesh."""

    dimension: str  # such as "shard", or "replicate x shard" for a flattened one
    name: str  # such as "all-gather"


@dataclass
class CollectiveTotal:
    """How often, and the bytes of the largest tensor of each call, summed."""

    calls: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Count a call."""
        self.calls += 1
        self.bytes += size


class StepRecorder:
    """Counts bytes alive, FLOPs and collectives. `observe` is called after every operation.

    Every allocation has a label, that of the innermost `labelled` block, so that the peak can be
    explained.
    """

    def __init__(self, dimension_of: Callable[[dist.ProcessGroup, str], str]):
        self._dimension_of = dimension_of  # of the group of a collective with that name
        self._live: dict[int, tuple[int, str]] = {}  # storage -> (bytes, label)
        self._label = "parameters"
        self.alive: Counter[str] = Counter()
        self.bytes_alive = 0
        self.restart()

    def restart(self) -> None:
        """Forget all but what is alive."""
        self.peak_bytes, self.alive_at_peak = self.bytes_alive, self.alive.copy()
        self.peak_phase = self.phase = ""
        self.flops: Counter[str] = Counter()  # by phase
        self.collectives: dict[CollectiveKind, CollectiveTotal] = {}

    def set_phase(self, phase: str) -> None:
        """Begin a phase of the step; its allocations are labelled with its name."""
        self.phase = self._label = phase

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Label allocations of the block."""
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def observe(self, operation: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Count an operation that has run."""
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._add(leaf)
        packet = operation._overloadpacket
        if packet is torch.ops.aten.linalg_solve_triangular:
            self.flops[self.phase] += _solve_flops(*args)
        elif packet in flop_registry:
            self.flops[self.phase] += flop_registry[packet](*args, **kwargs, out_val=result)
        elif operation.namespace in ("c10d", _FUNCTIONAL):
            self._count_collective(operation, args, kwargs, result)

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count that a storage has been resized."""
        if storage._cdata in self._live:
            self._set(storage._cdata, size)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._remove, key)

    def _set(self, key: int, size: int) -> None:
        before, label = self._live.get(key, (0, self._label))
        label = label if before else self._label
        self._live[key] = (size, label)
        self.alive[label] += size - before
        self.bytes_alive += size - before
        if self.bytes_alive > self.peak_bytes:
            self.peak_bytes, self.peak_phase = self.bytes_alive, self.phase
            self.alive_at_peak = self.alive.copy()

    def _remove(self, key: int) -> None:
        size, label = self._live.pop(key, (0, ""))
        self.alive[label] -= size
        self.bytes_alive -= size

    def _count_collective(self, operation: Any, args: tuple, kwargs: dict, result: Any) -> None:
        name = _collective_name(operation)
        group = _collective_group(operation, args, kwargs)
        if group is None or name in ("barrier", "monitored_barrier"):
            return
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if operation.namespace == _FUNCTIONAL:
            tensors += [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        size = max(tensor.nbytes for tensor in tensors)
        dimension = self._dimension_of(group, name)
        if size < SCALAR_BYTES or not dimension:
            return
        kind = CollectiveKind(dimension, name)
        self.collectives.setdefault(kind, CollectiveTotal()).add(size)


def _solve_flops(matrix: Tensor, right: Tensor, **kwargs: Any) -> int:
    """FLOPs of a triangular system [..., C, C] for [..., C, X], which torch does not count."""
    return right.numel() * matrix.shape[-1]


_NAMES = (  # (part of the name of an operator of torch, name of the collective)
    ("all_gather", "all-gather"),
    ("allgather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("all_reduce", "all-reduce"),
    ("allreduce", "all-reduce"),
    ("all_to_all", "all-to-all"),
    ("alltoall", "all-to-all"),
    ("send", "send"),
    ("recv", "receive"),
    ("broadcast", "broadcast"),
)


def _collective_name(operation: Any) -> str:
    raw = operation.name().partition("::")[2].lower()
    return next((name for part, name in _NAMES if part in raw), raw)


def _collective_group(operation: Any, args: tuple, kwargs: dict) -> dist.ProcessGroup | None:
    """The process group of a collective; None if the operation is not one."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
    if operation.namespace == _FUNCTIONAL and "wait_tensor" not in operation.name():
        names: list[Any] = [v for v in (*args, *kwargs.values()) if isinstance(v, str)]
        return dist.distributed_c10d._resolve_process_group(names[-1])
    return None
