"""Report an out-of-memory error with the memory in use and advice, instead of a traceback."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.collectives import registered_parameters
from titanlite.errors import UserError
from titanlite.metrics import peak_memory_bytes

GIB = 2**30
_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


class MemoryUsage:
    """Device memory of a rank's parameters, gradients and optimizer state."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module | None = None,
        optimizers: Iterable[torch.optim.Optimizer] = (),
    ):
        self.device, self._model, self._optimizers = device, model, optimizers

    def by_kind(self) -> dict[str, int]:
        """Bytes of this rank's shards on the device; 0 if not built yet, or offloaded."""
        parameters = registered_parameters(self._model) if self._model else []
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        moments = [value for state in states for value in state.values()]
        return {
            "parameters": self._local_bytes(parameters),
            "gradients": self._local_bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer state": self._local_bytes(m for m in moments if isinstance(m, Tensor)),
        }

    def limit_bytes(self) -> int | None:
        """Memory of the GPU, or on a CPU the process's address-space limit; None: no limit."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if limit == resource.RLIM_INFINITY else limit

    def _local_bytes(self, tensors: Iterable[Tensor]) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.nbytes for t in local if t.device.type == self.device.type)


@contextmanager
def explain_out_of_memory(
    usage: MemoryUsage, position: Callable[[], str], advice: list[str]
) -> Iterator[None]:
    """Replace an out-of-memory error by a UserError with the memory in use and advice.

    `position` returns the step and phase ("step 3, forward"); `advice`: lines for people.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        request = find_memory_request(error)
        if request is None:
            raise
        peak, limit = peak_memory_bytes(usage.device), usage.limit_bytes()
        of_limit = f" of {limit / GIB:.3g} GiB" if limit else ""
        allocated = ", ".join(f"{k} {size / GIB:.3g}" for k, size in usage.by_kind().items())
        lines = [
            f"out of memory at {position()}: {request}; peak {peak / GIB:.3g} GiB{of_limit}.",
            f"  allocated, in GiB: {allocated}",
            *advice,
        ]
        raise UserError("\n".join(lines)) from error


def find_memory_request(error: BaseException | None) -> str | None:
    """Describe the failed allocation; None if `error` is not an out-of-memory error.

    The GPU allocator raises torch.OutOfMemoryError. The CPU allocator and CUDA's libraries raise a
    RuntimeError that only its message identifies (torch 2.11 to 2.15). Python raises MemoryError.
    """
    while error is not None:
        message = str(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
            text in message for text in _MESSAGES
        ):
            size = re.search(r"tried to allocate ([\d.]+ \w+)", message, re.IGNORECASE)
            return f"cannot allocate {_in_gib(size[1])}" if size else "cannot allocate more"
        error = error.__cause__ or error.__context__
    return None


def _in_gib(size: str) -> str:
    number, unit = size.split()
    return f"{int(number) / GIB:.3g} GiB" if unit == "bytes" else size
