"""What is held in memory, counted from the tensors themselves."""

from __future__ import annotations

import re
import resource

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.metrics.hardware import peak_memory_bytes

_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def find_memory_request(error: BaseException | None) -> str | None:
    """What was asked for when memory ran out, in words; None where an error is about other things.

    A GPU's allocator says it by torch.OutOfMemoryError; a CPU's, and CUDA's libraries, by a
    RuntimeError that only its words tell apart (torch 2.11 to 2.15); Python by MemoryError.
    """
    while error is not None:
        words = str(error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
            sign in words for sign in _SIGNS
        ):
            asked = re.search(r"tried to allocate ([\d.]+ \w+)", words, re.IGNORECASE)
            return f"{_shown(asked[1])} more was asked for" if asked else "more was asked for"
        error = error.__cause__ or error.__context__
    return None


def _shown(asked: str) -> str:
    number, unit = asked.split()
    return f"{int(number) / 2**30:.3g} GiB" if unit == "bytes" else asked


class MemoryUsage:
    """What a rank holds on its device; empty until it is told of a model and an optimizer."""

    def __init__(self, device: torch.device):
        self.device = device
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def bytes(self) -> dict[str, int]:
        """Of weights, gradients and moments: this rank's shards, where they are on the device."""
        weights = list(self.model.parameters()) if self.model else []
        states = self.optimizer.state.values() if self.optimizer else []
        moments = [value for state in states for value in state.values()]
        return {
            "weights": self._sum(weights),
            "gradients": self._sum(w.grad for w in weights if w.grad is not None),
            "moments": self._sum(value for value in moments if isinstance(value, Tensor)),
        }

    def _sum(self, tensors) -> int:
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return sum(t.nbytes for t in local if t.device.type == self.device.type)

    def peak(self) -> int:
        return peak_memory_bytes(self.device)

    def limit(self) -> str:
        """Of how much, in words."""
        if self.device.type == "cuda":
            return f" of {torch.cuda.get_device_properties(self.device).total_memory / 2**30:.3g}"
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most == resource.RLIM_INFINITY:
            return ""
        return f" of {most / 2**30:.3g} that may be addressed"
