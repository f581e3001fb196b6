"""Measured FLOP/s of a device, and its peak memory."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch


@torch.no_grad()
def measure_matmul_flops(dtype: torch.dtype, device: torch.device, seconds: float = 0.25) -> float:
    """FLOP/s of the fastest of the large matmuls that fit into `seconds`; at least three run.

    Of the three layouts in training (x W^T in forward, dy W and dy^T x in backward) the fastest
    counts: in float16 on a CPU, the first is 7 times as fast as the second.
    """
    size = 8192 if device.type == "cuda" else 1024
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's random state alone
    left, right = torch.randn(2, size, size, device=device, generator=generator).to(dtype)
    layouts = ((left, right.mT), (left, right), (left.mT, right))
    # loads the kernel; on a CPU all three layouts come from one library
    for layout in layouts if device.type == "cuda" else layouts[:1]:
        _seconds_of_matmul(*layout)
    end = time.perf_counter() + seconds
    times = [_seconds_of_matmul(*layout) for layout in layouts]
    best, fastest = min(times), layouts[times.index(min(times))]
    while time.perf_counter() < end:
        best = min(best, _seconds_of_matmul(*fastest))
    return 2 * size**3 / best


def cpu_has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has matmul instructions for bfloat16, of x86 or ARM.

    Others emulate it: 0.013 TFLOP/s against 0.051 in float32 on a Xeon with AVX-512F. Not measured:
    all ranks, and all starts of a run, must find the same.
    """
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []  # Linux only
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def _seconds_of_matmul(left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - start


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of the tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
