"""What kernels do, in numbers that do not depend on the speed of a GPU."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

MATMULS = {"mm", "addmm", "bmm", "_scaled_mm", "_grouped_mm", "grouped_matmul"}
MATMULS |= {"_scaled_grouped_mm_v2"}


class Matmul(NamedTuple):
    """A matrix multiplication [m, k] x [k, n], or a group of them with m rows, or k, in all."""

    dtype: torch.dtype
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


class Attention(NamedTuple):
    """A call of an attention kernel."""

    kernel: str  # flash, cudnn, efficient
    is_backward: bool
    flops: int  # of the part that is not masked


@dataclass
class Work:
    """What was executed, in numbers that do not depend on the speed of the device."""

    kernels: int = 0  # without matmuls and attention
    read: float = 0  # bytes of these kernels
    written: float = 0
    minimum: float = 0  # of both: see MinimumBytes
    instructions: float = 0  # of warps
    matmuls: Counter[Matmul] = field(default_factory=Counter)
    attention: Counter[Attention] = field(default_factory=Counter)

    @property
    def bytes(self) -> float:
        return self.read + self.written

    @property
    def flops(self) -> int:
        """Of matmuls and attention."""
        of_matmuls = sum(call.flops * count for call, count in self.matmuls.items())
        return of_matmuls + sum(call.flops * count for call, count in self.attention.items())

    def add(self, other: Work, scale: float = 1.0) -> None:
        """Add work that was executed on tensors that are `scale` times as large."""
        self.kernels += other.kernels
        for name in ("read", "written", "minimum", "instructions"):
            setattr(self, name, getattr(self, name) + scale * getattr(other, name))
        self.matmuls += other.matmuls
        self.attention += other.attention


@dataclass
class CompiledGraph:
    """A graph on the target, in a forward or a backward."""

    is_backward: bool
    work: Work = field(default_factory=Work)
    elements: int = 0  # of the largest input, in the sizes that `work` counts
    saved_bytes: int = 0  # activations that a forward keeps for its backward
    file: str = ""  # of the code that most of its operators come from


def describe_call(op: Any, args: Any, kwargs: Any, output: Any) -> Matmul | Attention | None:
    """A matmul or an attention; None for any other operator. Tensors may be fake."""
    name = op.name().partition("::")[2].partition(".")[0]
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    if name in MATMULS:
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        a, b = tensors[1:3] if name == "addmm" else tensors[:2]
        m, k, n = math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
        return Matmul(a.dtype, int(m), int(k), int(n))
    if "attention" in name and op.overloadpacket in flop_registry:
        flops = flop_registry[op.overloadpacket](*args, **kwargs, out_val=output)
        causal = given.get("is_causal", given.get("causal", False))
        kernel = next((k for k in ("flash", "cudnn", "efficient") if k in name), name)
        return Attention(kernel, "backward" in name, int(flops) // (2 if causal else 1))
    return None
