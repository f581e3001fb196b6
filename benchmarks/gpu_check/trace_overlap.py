"""How much of the transfers in a profiler trace ran while the GPU computed matmuls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.files import parse_json, read_regular_file

ALL_GATHERS = re.compile(r"nccl\w*AllGather", re.IGNORECASE)
COPIES = re.compile(r"Memcpy (DtoH|HtoD) .*Pinned")
MATMULS = re.compile(r"gemm|nvjet|cutlass|xmma|matmul", re.IGNORECASE)
_ON_DEVICE = ("kernel", "gpu_memcpy")

Interval = tuple[float, float]  # start and end, in microseconds


@dataclass(frozen=True)
class Overlap:
    """Times of one step on one GPU, in microseconds."""

    transfer_us: float
    matmul_us: float
    both_us: float  # a transfer and a matmul at the same time

    @property
    def share(self) -> float:
        """Share of the transfers' time that ran beside a matmul."""
        return self.both_us / self.transfer_us if self.transfer_us else 0.0


def overlap_in_trace(trace: Path, transfers: re.Pattern[str]) -> Overlap:
    """Read a Chrome trace of torch.profiler."""
    events = parse_json(read_regular_file(trace))["traceEvents"]
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE and "dur" in event]
    moved, computed = (
        _union((e["ts"], e["ts"] + e["dur"]) for e in on_device if pattern.search(e["name"]))
        for pattern in (transfers, MATMULS)
    )
    return Overlap(_length(moved), _length(computed), _length(_intersection(moved, computed)))


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order, which cover what `intervals` cover."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def _intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return [(start, end) for start, end in pairs if start < end]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
