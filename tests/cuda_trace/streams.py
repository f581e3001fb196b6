"""CUDA streams, events, devices of threads and pinned memory, recorded on a machine without a GPU.

`record_cuda` replaces these parts of torch.cuda. Tensors are on the CPU, so a program computes
what it would compute, and the recorder checks what a GPU would be free to do otherwise:

- Every stream has a vector clock: how many operations of each stream are complete before its next
  one begins. Only events and the host change that. `races` has the pairs of operations of different
  streams on the same memory that are not ordered.
- Memory that a copy stream uses must not be freed before the compute stream, to which the allocator
  may give it next, waits for the copy. Such copies are in `races` too.
- `runtime.registered` has the ranges of pinned memory; a range that overlaps another one, or is no
  longer mapped when it is unregistered, is an error as on a GPU.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter[str]  # stream -> number of its operations that are complete


class Call(NamedTuple):
    """One call into torch.cuda."""

    thread: str  # name of the thread
    name: str  # "wait", "record", "synchronize", "copy", "set_device" ...
    stream: str = ""  # whose next operations the call affects
    detail: Any = None


class Access(NamedTuple):
    """One operation's use of a range of memory."""

    stream: str
    tick: int  # number of the operation in its stream
    start: int
    end: int
    writes: bool
    operation: str


class RecordedEvent:
    """Like torch.cuda.Event: the clock of a stream at the time of the record."""

    recorder: CudaRecorder

    def __init__(self, **options: Any):
        self.clock: Clock = Counter()
        self.stream = ""

    def record(self, stream: RecordedStream | None = None) -> None:
        stream = stream or self.recorder.current_stream()
        self.clock, self.stream = Counter(stream.clock), stream.name
        self.recorder.log("record", stream.name)

    def wait(self, stream: RecordedStream | None = None) -> None:
        stream = stream or self.recorder.current_stream()
        stream.clock |= self.clock
        self.recorder.log("wait", stream.name, (self.stream, self.clock[self.stream]))

    def synchronize(self) -> None:
        self.recorder.wait_on_host(self.clock)
        self.recorder.log("synchronize", self.stream)

    def query(self) -> bool:
        return False


class RecordedStream:
    """Like torch.cuda.Stream."""

    recorder: CudaRecorder

    def __init__(self, device: Any = None, priority: int = 0, name: str = ""):
        self.name = name or self.recorder.new_stream_name()
        self.clock: Clock = Counter()

    def wait_event(self, event: RecordedEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: RecordedStream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: RecordedEvent | None = None) -> RecordedEvent:
        event = event or self.recorder.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class RecordedRuntime:
    """Like torch.cuda.cudart(), for pinned memory; returns error codes."""

    def __init__(self, recorder: CudaRecorder):
        self.registered: dict[int, int] = {}  # address -> bytes
        self.refuse = 0  # error code of the next registrations
        self._recorder = recorder

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        overlaps = any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        error = self.refuse or (712 if overlaps else 0)
        if not error:
            self.registered[address] = nbytes
        self._recorder.log("cudaHostRegister", detail=(nbytes, error))
        return error

    def cudaHostUnregister(self, address: int) -> int:
        nbytes = self.registered.pop(address, 0)
        error = 0 if nbytes and _is_mapped(address, nbytes) else 713
        self._recorder.log("cudaHostUnregister", detail=(nbytes, error))
        return error

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory", 712: "already registered", 713: "not registered"}[error]


class CudaRecorder:
    """What a program calls of torch.cuda."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.runtime = RecordedRuntime(self)
        self.devices: dict[str, int] = {}  # thread -> device; a new thread is on device 0
        self.pinned: list[Tensor] = []  # from `pin_memory=True`; kept, so that none is reused
        self.accesses: dict[str, list[Access]] = defaultdict(list)  # by stream
        self.races: list[tuple[Access, Access | None]] = []  # (earlier, later; None: the free)
        self.event_class = type("RecordedEvent", (RecordedEvent,), {"recorder": self})
        self.stream_class = type("RecordedStream", (RecordedStream,), {"recorder": self})
        self._host_clocks: dict[str, Clock] = defaultdict(Counter)
        self._streams = 0
        self._copied: list[tuple[StorageWeakRef, Access]] = []  # memory used by copy streams
        self._compute = self.stream_class(name="compute")
        self._current = threading.local()

    def log(self, name: str, stream: str = "", detail: Any = None) -> None:
        self.calls.append(Call(threading.current_thread().name, name, stream, detail))

    def new_stream_name(self) -> str:
        self._streams += 1
        return f"stream {self._streams}"

    def host_clock(self) -> Clock:
        """What this thread knows to be complete on the device."""
        return self._host_clocks[threading.current_thread().name]

    def wait_on_host(self, clock: Clock) -> None:
        self._host_clocks[threading.current_thread().name] |= clock

    # --- replacements of torch.cuda --------------------------------------------------------------

    def current_stream(self, device: Any = None) -> RecordedStream:
        return getattr(self._current, "stream", self._compute)

    @contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def set_device(self, device: Any) -> None:
        self.devices[threading.current_thread().name] = torch.device("cuda", device).index
        self.log("set_device", detail=device)

    def current_device(self) -> int:
        return self.devices.get(threading.current_thread().name, 0)

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        thread = threading.current_thread().name
        before, self.devices[thread] = self.current_device(), device
        try:
            yield
        finally:
            self.devices[thread] = before

    def synchronize(self, device: Any = None) -> None:
        self.log("synchronize", "device", self.current_device())

    # --- memory ----------------------------------------------------------------------------------

    def record_pinned(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`allocate`, which may get `pin_memory=True`."""

        def allocate_on_host(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            tensor = allocate(*sizes, **options)
            if pin_memory:
                self.pinned.append(tensor)
            return tensor

        return allocate_on_host

    def access(self, operation: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record one operation of the current stream."""
        stream = self.current_stream()
        self.check_freed_memory()
        stream.clock |= self.host_clock()  # enqueued after what the host has waited for
        stream.clock[stream.name] += 1
        if stream is not self._compute:
            self.log("copy", stream.name)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                start, tick = tensor.untyped_storage().data_ptr(), stream.clock[stream.name]
                end = start + tensor.untyped_storage().nbytes()
                access = Access(stream.name, tick, start, end, is_write, operation)
                self._check_order(access, stream.clock)
                self.accesses[stream.name].append(access)
                if stream is not self._compute:
                    self._copied.append((StorageWeakRef(tensor.untyped_storage()), access))

    def check_freed_memory(self) -> None:
        """Find memory that was freed since the last operation, while a copy may still use it."""
        in_use = []
        for storage, access in self._copied:
            if self._compute.clock[access.stream] >= access.tick:
                continue
            if storage.expired():
                self.races.append((access, None))
            else:
                in_use.append((storage, access))
        self._copied = in_use

    def _check_order(self, new: Access, clock: Clock) -> None:
        for stream, accesses in self.accesses.items():
            unordered = takewhile(lambda old: old.tick > clock[old.stream], reversed(accesses))
            self.races += [
                (old, new)
                for old in (unordered if stream != new.stream else ())
                if (old.writes or new.writes) and old.start < new.end and new.start < old.end
            ]


class _Accesses(TorchDispatchMode):
    """Reports to the recorder the memory that each operation reads and writes."""

    def __init__(self, recorder: CudaRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema, writes, reads = function._schema, [], []
        for argument, value in zip(schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(_tensors(value))
        is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        is_allocation = "empty" in function.name()
        if not is_view and not is_allocation:
            self._recorder.access(function.name(), reads, writes or _tensors(result))
        return result


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def record_cuda() -> Iterator[CudaRecorder]:
    """Replace the parts of torch.cuda that are recorded, in all threads, inside the block."""
    recorder = CudaRecorder()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("current_stream", "stream", "set_device", "current_device", "device"):
            patch.setattr(torch.cuda, name, getattr(recorder, name))
        patch.setattr(torch.cuda, "synchronize", recorder.synchronize)
        patch.setattr(torch.cuda, "Stream", recorder.stream_class)
        patch.setattr(torch.cuda, "Event", recorder.event_class)
        patch.setattr(torch.cuda, "cudart", lambda: recorder.runtime)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for name in ("empty", "empty_strided"):
            patch.setattr(torch, name, recorder.record_pinned(getattr(torch, name)))
        yield recorder


@contextmanager
def record_accesses(recorder: CudaRecorder) -> Iterator[None]:
    """Record the operations of this thread inside the block, backward included."""
    with _Accesses(recorder):
        yield
    recorder.check_freed_memory()


def _is_mapped(address: int, nbytes: int) -> bool:
    """Whether the process still has all of this memory (Linux)."""
    end = address
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= end < last:
            end = last
    return end >= address + nbytes
