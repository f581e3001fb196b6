"""A CUDA device without a GPU: fake tensors on cuda:0, and a trace of what a step does with them.

Tensors on the device have shapes, dtypes and strides, but no values (`FakeTensorMode`, which works
in a CPU build of torch too). Tensors in host memory are real, so the loop, the data pipeline and
the metrics run as usual. A copy to the host returns ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import _sharding_prop
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanlite.distributed import rank_tree
from titanlite.parallelize import token_exchange
from titanlite_planner.dry_run.ranks import even_row_numbers

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # Hopper: all kernels and Float8
CUDA_VERSION = "13.0"  # of the builds of torch 2.11 and later on PyPI
PLAIN_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)

# Operations whose result is a value, or has a shape that depends on values: on a GPU the host waits
# for it. Each raises an error in FakeTensorMode, but for the first, which is answered with 1.
HOST_READS = {
    "aten::_local_scalar_dense",  # item(), bool(), float(), tolist() of a scalar
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave.Tensor",  # without output_size
}
# Operations that raise an error on a GPU if deterministic algorithms are on, whatever their
# arguments: see torch.use_deterministic_algorithms, and alertNotDeterministic in ATen/native/cuda.
NONDETERMINISTIC = {
    "aten::median.dim",
    "aten::nanmedian.dim",
    "aten::histc",
    "aten::put_",
    "aten::nll_loss2d_forward",
    "aten::_ctc_loss",
}
INDEXING = {"aten::index.Tensor", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}

GROUPED_FLOAT8 = "aten::_scaled_grouped_mm_v2"  # F.scaled_grouped_mm
if not torch._C._dispatch_has_kernel_for_dispatch_key(GROUPED_FLOAT8, "Meta"):  # in torch 2.13

    @torch.library.register_fake(GROUPED_FLOAT8)
    def _(*operands, **options):
        """Checks sizes and strides, as the operator of one scale for each row does."""
        x, weight, (x_scales,), _, _, (weight_scales,), _, _, offs, *_ = operands
        return aten._scaled_grouped_mm(x, weight, x_scales, weight_scales, offs)


@dataclass
class Trace:
    """What the steps of a run did, by the step that the watchdog reports."""

    position: Callable[[], tuple[int, str]] = lambda: (0, "")  # (step, phase) of the main thread
    waits: list[tuple[int, str]] = field(default_factory=list)  # (step, what the host waits for)
    collectives: list[tuple[int, str, torch.dtype]] = field(default_factory=list)
    # on the device: (step, operator, dtype of its input)
    operations: Counter[int] = field(default_factory=Counter)  # step -> operations on the device
    attention: Counter[tuple[int, str]] = field(default_factory=Counter)  # by (step, operator)

    def restart(self, position: Callable[[], tuple[int, str]]) -> None:
        """Forget everything, and trace a run with this position."""
        self.position = position
        for records in (self.waits, self.collectives, self.operations, self.attention):
            records.clear()

    def wait(self, reason: str) -> None:
        """Record that the host waits for the device."""
        step, phase = self.position()
        self.waits.append((step, f"{phase}: {reason}"))

    def waits_of(self, step: int) -> list[str]:
        """What the host waited for in a step."""
        return [reason for at, reason in self.waits if at == step]

    def attention_of(self, step: int) -> dict[str, int]:
        """The calls of each attention operator in a step."""
        return {name: calls for (at, name), calls in sorted(self.attention.items()) if at == step}

    def collectives_of(self, step: int) -> dict[str, list[str]]:
        """The dtypes of each kind of collective in a step."""
        dtypes: dict[str, set[str]] = {}
        for at, name, dtype in self.collectives:
            if at == step:
                dtypes.setdefault(name, set()).add(str(dtype).removeprefix("torch."))
        return {name: sorted(found) for name, found in sorted(dtypes.items())}


class PinnedMemory:
    """The host memory that is page-locked, by the address of its storage."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef | None] = {}  # None: until it is unregistered

    def register(self, address: int, size: int, flags: int = 0) -> int:
        """As cudaHostRegister."""
        self._storages[address] = None
        return 0

    def unregister(self, address: int) -> int:
        """As cudaHostUnregister."""
        self._storages.pop(address, None)
        return 0

    def add(self, tensor: Tensor) -> Tensor:
        """Pin the memory of a host tensor until it is freed."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def contains(self, tensor: Tensor) -> bool:
        """Whether the memory of a host tensor is pinned."""
        address = tensor.untyped_storage().data_ptr()
        if address not in self._storages:
            return False
        storage = self._storages[address]
        return storage is None or not storage.expired()


def active_fake_mode() -> FakeTensorMode | None:
    """The innermost FakeTensorMode."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


class DeviceTrace(TorchDispatchMode):
    """Runs operations on the device with fake tensors, all others as usual, and records both."""

    def __init__(self, trace: Trace, pinned: PinnedMemory, fake_mode: FakeTensorMode):
        super().__init__()
        self.trace, self.pinned, self.fake_mode = trace, pinned, fake_mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise nothing is compiled

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not all(kind in PLAIN_TENSORS for kind in types):
            return NotImplemented  # DTensor and others call this again for their local tensors
        kwargs = dict(kwargs or {})
        if active_fake_mode() is not self.fake_mode:
            return operation(*args, **kwargs)  # DTensor's computation of shapes
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if fake and operation.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(operation, tensors)
        target = kwargs.get("device")
        if fake or (target is not None and torch.device(target).type == "cuda"):
            return self._run_on_device(operation, args, kwargs)
        with unset_fake_temporarily():
            return self._run_on_host(operation, args, kwargs)

    def _run_on_host(self, operation, args, kwargs):
        if operation is aten.is_pinned.default:
            return self.pinned.contains(args[0])
        if operation is aten._pin_memory.default:
            return self.pinned.add(args[0].clone())
        if kwargs.pop("pin_memory", False):
            return self.pinned.add(operation(*args, **kwargs))
        return operation(*args, **kwargs)

    def _run_on_device(self, operation, args, kwargs):
        name, (step, _) = operation.name(), self.trace.position()
        self.trace.operations[step] += 1
        if name.startswith("aten::_scaled_dot_product_"):
            self.trace.attention[step, name.removeprefix("aten::_scaled_dot_product_")] += 1
        if name in NONDETERMINISTIC and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(f"{name} does not have a deterministic implementation on CUDA")
        if operation.namespace == "titanlite":  # what is in it, not its result alone
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        if operation in (aten._local_scalar_dense.default, aten.item.default):
            self.trace.wait(name)
            with unset_fake_temporarily():
                return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        if name in HOST_READS and kwargs.get("output_size") is None:
            self.trace.wait(name)
        if name in INDEXING:
            self._check_indices(name, args)
        if operation is aten.addmm.dtype_out:  # torch 2.11 cannot fake it
            return kwargs["out"]
        if operation is aten._to_copy.default:
            return self._copy_to(operation, args, kwargs)
        if operation is aten.copy_.default:
            return self._copy_into(*args, **kwargs)
        if operation is aten._foreach_copy_.default:
            pairs = list(zip(args[0], args[1], strict=True))
            if any(target.device != source.device for target, source in pairs):
                for target, source in pairs:
                    self._copy_into(target, source, *args[2:], **kwargs)
                return None
        return operation(*args, **kwargs)

    def _check_indices(self, name: str, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        if any(index.device.type == "cpu" for index in indices):
            self.trace.wait(f"{name} with indices in host memory")
        values = args[2] if len(args) > 2 else None
        fills = values is not None and values.numel() == 1 and values.device.type == "cpu"
        if not fills and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.trace.wait(f"{name} with a mask")  # a fill runs as masked_fill_

    def _copy_to(self, operation, args, kwargs):
        """`Tensor.to`: a copy to the host is pinned if it is asynchronous, as in torch."""
        (source,), target = args, torch.device(kwargs.get("device") or args[0].device)
        non_blocking = kwargs.get("non_blocking", False)
        if target.type == "cuda" and source.device.type == "cpu":
            self._check_upload(source, non_blocking)
        if target.type != "cpu":
            return operation(*args, **kwargs)
        if not non_blocking:
            self.trace.wait("blocking copy to the host")
        with unset_fake_temporarily():
            copy = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return self.pinned.add(copy) if non_blocking else copy

    def _copy_into(self, target, source, non_blocking=False):
        if target.device.type == "cuda":
            if source.device.type == "cpu":
                self._check_upload(source, non_blocking)
            return aten.copy_(target, source, non_blocking)
        if not non_blocking:
            self.trace.wait("blocking copy to the host")
        elif not self.pinned.contains(target):
            self.trace.wait("copy to pageable host memory")
        with unset_fake_temporarily():
            return target.fill_(1)

    def _check_upload(self, source: Tensor, non_blocking: bool) -> None:
        """A copy from pageable memory waits for the stream, also if it is called non-blocking."""
        if not non_blocking:
            self.trace.wait("blocking copy to the device")
        elif not self.pinned.contains(source):
            self.trace.wait("copy from pageable host memory")

    def _record_collective(self, operation, tensors: list[Tensor]) -> None:
        name = operation.name().partition("::")[2].partition(".")[0]
        if name != "wait_tensor":
            step, _ = self.trace.position()
            # The arguments are (outputs, inputs, …) or (inputs, …).
            self.trace.collectives.append((step, name, tensors[-1].dtype))


@torch.compiler.assume_constant_result
def _sdpa_kernel() -> str:
    """The kernel that SDPA takes on a GPU that supports all of them."""
    backends = torch.backends.cuda
    enabled = {
        "flash": backends.flash_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
    }
    return next((name for name, is_enabled in enabled.items() if is_enabled), "math")


def fake_attention(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDPA with the kernels of a GPU; for CUDA, a CPU build of torch knows only "math"."""

    def attention(q, k, v, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        kernel = _sdpa_kernel()
        if kernel == "math" or not q.is_cuda:
            return attend(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
        if kernel == "cudnn":
            attend_fused = aten._scaled_dot_product_cudnn_attention
        else:
            attend_fused = aten._scaled_dot_product_efficient_attention
        return attend_fused(q, k, v, None, True, 0.0, is_causal)[0]

    return attention


class FakeStream:
    """A CUDA stream that does nothing; waiting for it on the host is recorded."""

    trace: Trace  # set in a subclass, so that torch.cuda.Stream is a class

    def __init__(self, device: Any = None, priority: int = 0, **_options: Any):
        self.device, self.priority = DEVICE, priority
        self.device_type, self.device_index, self.stream_id = 1, 0, 0

    def wait_stream(self, stream: FakeStream) -> None: ...
    def wait_event(self, event: FakeEvent) -> None: ...

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or torch.cuda.Event()  # type: ignore[return-value]

    def synchronize(self) -> None:
        self.trace.wait("Stream.synchronize")

    def query(self) -> bool:
        return True


class FakeEvent:
    """A CUDA event that is always complete; waiting for it on the host is recorded."""

    trace: Trace

    def __init__(self, **_options: bool): ...

    def record(self, stream: FakeStream | None = None) -> FakeEvent:
        return self

    def wait(self, stream: FakeStream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.trace.wait("Event.synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1.0


class HostGenerator(torch.Generator):
    """A generator on the host, whatever device it is asked for."""

    def __new__(cls, device: Any = None):
        return super().__new__(cls, "cpu")


@contextmanager
def fake_cuda(trace: Trace) -> Iterator[None]:
    """One GPU in the block: torch.cuda answers for it, and every operation on it is recorded."""
    pinned = PinnedMemory()
    with pytest.MonkeyPatch.context() as patch:
        stream_class = type("Stream", (FakeStream,), {"trace": trace})
        event_class = type("Event", (FakeEvent,), {"trace": trace})
        stream = stream_class()
        replaced: dict[str, Any] = {
            "Stream": stream_class,
            "Event": event_class,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda stream: nullcontext(),
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
            "is_initialized": lambda: True,
            "get_device_capability": lambda device=None: CAPABILITY,
            "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "max_memory_allocated": lambda device=None: 1 << 30,
            "memory_allocated": lambda device=None: 1 << 30,
            "synchronize": lambda device=None: trace.wait("torch.cuda.synchronize"),
        }
        for name, function in replaced.items():
            patch.setattr(torch.cuda, name, function)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setattr(torch.version, "cuda", CUDA_VERSION)
        # DTensor computes shapes on CPU tensors; they must be fake, in a mode of its own.
        patch.setattr(_sharding_prop, "detect_fake_mode", lambda *_: None, raising=False)
        runtime = type("Runtime", (), {})()
        runtime.cudaHostRegister, runtime.cudaHostUnregister = pinned.register, pinned.unregister
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        # Called in the prefetch thread too, where no dispatch mode is active.
        patch.setattr(Tensor, "pin_memory", lambda self, device=None: pinned.add(self.clone()))
        patch.setattr(torch, "Generator", HostGenerator)
        attention = fake_attention(F.scaled_dot_product_attention)
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(
            torch.UntypedStorage, "data_ptr", _storage_address(torch.UntypedStorage.data_ptr)
        )
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, DeviceTrace(trace, pinned, mode):
            yield


def _storage_address(data_ptr: Callable) -> Callable:
    """`UntypedStorage.data_ptr` that tells fake storages apart too."""
    return lambda self: self._cdata if self.device.type == "meta" else data_ptr(self)


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """A process group in which this process is rank 0, and no other rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    read_row_numbers = token_exchange.read_row_numbers

    def read_even_row_numbers(rows: int, *counts: Tensor) -> list[list[int]]:
        read_row_numbers(rows, *counts)  # the host waits for it
        return even_row_numbers(rows, *counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_exchange, "read_row_numbers", read_even_row_numbers)
        patch.setattr(dist, "new_group", _fake_new_group(dist.new_group))
        patch.setattr(rank_tree, "children_of", lambda rank, size: [])  # none answers
        try:
            yield
        finally:
            dist.destroy_process_group()


def _fake_new_group(new_group: Callable) -> Callable:
    """`new_group` without gloo, whose groups would wait for the other ranks."""
    groups_of_some_ranks: list[Any] = []

    def new_fake_group(*args: Any, **options: Any) -> Any:
        group = new_group(*args, **{**options, "backend": "fake"})
        if options.get("use_local_synchronization"):
            groups_of_some_ranks.append(group)
        else:  # torch 2.15 names this one by the number of groups that the rank has created
            assert not groups_of_some_ranks, "ranks may have created different numbers of groups"
        return group

    return new_fake_group
