"""The bytes that the kernels of a part must at least move, beside matmuls and attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # tells storages apart after their end

Place = tuple[int, int]  # (offset, elements) of a tensor in its storage


@dataclass
class _Memory:
    """What happened to a storage since it was written."""

    storage: StorageWeakRef
    writer: str = ""  # the part whose kernels wrote it; "": a matmul, or an earlier step
    unused: dict[Place, int] = field(default_factory=dict)  # bytes that only the writer has read
    read: set[tuple[str, Place]] = field(default_factory=set)  # by parts that did not write it


class MinimumBytes:
    """Follows the tensors of a step through its operators, compiled ones too.

    A part reads once what it gets from matmuls, attention, other parts and earlier steps, and
    writes once what it gives them. What only its own kernels read could stay on the chip.
    """

    def __init__(self) -> None:
        self.of_part: Counter[str] = Counter()
        self._memories: dict[int, _Memory] = {}

    def outside(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """A matmul, an attention or a collective."""
        for tensor in read:
            self._use(self._memory_of(tensor))
        for tensor in written:
            self._overwrite("", self._memory_of(tensor))

    def kernel(self, part: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Any other operator of a part."""
        for tensor in read:
            memory, seen = self._memory_of(tensor), (part, _place(tensor))
            if memory.writer == part:
                continue
            self._use(memory)
            if seen not in memory.read:
                memory.read.add(seen)
                self.of_part[part] += _bytes(tensor)
        for tensor in written:
            memory = self._memory_of(tensor)
            self._overwrite(part, memory)
            memory.unused[_place(tensor)] = _bytes(tensor)

    def end_step(self) -> None:
        """Count what the next step can read, and forget the tensors."""
        for memory in self._memories.values():
            if not memory.storage.expired():
                self._use(memory)
        self._memories.clear()

    def _use(self, memory: _Memory) -> None:
        self.of_part[memory.writer] += sum(memory.unused.values())
        memory.unused.clear()

    def _overwrite(self, writer: str, memory: _Memory) -> None:
        if writer != memory.writer or not writer:
            self._use(memory)  # of another writer, who may have written another place
            memory.writer = writer
            memory.read.clear()

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._memories.setdefault(storage.cdata, _Memory(storage))


def _place(tensor: Tensor) -> Place:
    return int(tensor.storage_offset()), int(tensor.numel())


def _bytes(tensor: Tensor) -> int:
    """Of a tensor in memory, where an expanded one is smaller."""
    return min(int(tensor.numel()) * tensor.element_size(), int(tensor.untyped_storage().nbytes()))
