"""Speed of matmuls, copies and collectives.

As a program, `torchrun … -m benchmarks.gpu_check.bandwidth cuda`, it measures the collectives of
all ranks, and prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_check.outcome import Machine, Outcome, run_command
from benchmarks.gpu_check.runs import MAX_RUN_SECONDS, torchrun
from titanlite.metrics.gpu_peaks import peak_flops
from titanlite.metrics.hardware import measure_matmul_flops

MATMUL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COPY_BYTES = 256 << 20
COLLECTIVE_BYTES = {"cuda": (1 << 20, 64 << 20, 1 << 30), "cpu": (1 << 20,)}
REPETITIONS = 5


def check_matmul_peak(machine: Machine) -> Iterator[Outcome]:
    """Matmul FLOP/s by dtype, and as a share of the published peak."""
    device = torch.device(machine.device_type)
    for dtype in MATMUL_DTYPES if machine.cuda else (torch.float32, torch.bfloat16):
        name = f"matmul {str(dtype).removeprefix('torch.')}"
        flops = measure_matmul_flops(dtype, device, seconds=1.0 if machine.cuda else 0.2)
        result = f"{flops / 1e12:.3g} TFLOP/s"
        peak = peak_flops(torch.cuda.get_device_name(device), dtype) if machine.cuda else None
        if peak:
            result += f", {flops / peak:.0%} of the published {peak / 1e12:.4g}"
        yield Outcome(name, "passed", result)


def check_copies(machine: Machine) -> Iterator[Outcome]:
    """Bandwidth of copies to, from and on the first GPU."""
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pageable, other = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.empty_like(device)
    copies: dict[str, tuple[Tensor, Tensor, int]] = {
        "copy pinned host to GPU": (device, pinned, 1),
        "copy GPU to pinned host": (pinned, device, 1),
        "copy pageable host to GPU": (device, pageable, 1),
        "copy on the GPU (read and write)": (other, device, 2),
    }
    for name, (target, source, accesses) in copies.items():
        seconds = _seconds(partial(target.copy_, source, non_blocking=True), "cuda")
        yield Outcome(name, "passed", f"{accesses * COPY_BYTES / seconds / 1e9:.4g} GB/s")


def check_collectives(machine: Machine) -> Iterator[Outcome]:
    """Bus bandwidth of the collectives that the parallel layouts use, over all devices."""
    program = ["-m", "benchmarks.gpu_check.bandwidth", machine.device_type]
    output = run_command(
        [*torchrun(machine.devices), *program],
        timeout=MAX_RUN_SECONDS,
        variables={"OMP_NUM_THREADS": "1"},
    )
    line = next(line for line in output.splitlines() if line.startswith("{"))
    for name, by_size in json.loads(line).items():
        figures = ", ".join(f"{speed:.3g} GB/s ({size})" for size, speed in by_size.items())
        yield Outcome(f"{name}, bus bandwidth", "passed", figures)


def measure_collectives(device_type: str) -> dict[str, dict[str, float]]:
    """Bus bandwidth in GB/s by collective and size, on every rank of the default group.

    The bus bandwidth is comparable between numbers of ranks n: bytes / seconds times 2(n - 1)/n for
    an all-reduce and (n - 1)/n for the others, as in nccl-tests
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    ranks, results = dist.get_world_size(), dict[str, dict[str, float]]()
    for name, (collective, factor) in _collectives(ranks).items():
        results[name] = by_size = {}
        for size in COLLECTIVE_BYTES[device_type]:
            elements = size // 4 // ranks * ranks
            full = torch.zeros(elements, device=device_type)
            part = torch.zeros(elements // ranks, device=device_type)
            dist.barrier()
            seconds = _seconds(partial(collective, full, part), device_type)
            by_size[f"{size >> 20} MiB"] = factor * 4 * elements / seconds / 1e9
    return results


def _collectives(ranks: int) -> dict[str, tuple[Callable[[Tensor, Tensor], object], float]]:
    """(collective over a full tensor and this rank's part of it, factor of the bus bandwidth)."""
    others = (ranks - 1) / ranks
    return {
        "all-reduce": (lambda full, part: dist.all_reduce(full), 2 * others),
        "all-gather": (lambda full, part: dist.all_gather_into_tensor(full, part), others),
        "reduce-scatter": (lambda full, part: dist.reduce_scatter_tensor(part, full), others),
        "all-to-all": (
            lambda full, part: dist.all_to_all_single(torch.empty_like(full), full),
            others,
        ),
    }


def _seconds(act: Callable[[], object], device_type: str) -> float:
    """Duration of one call: the mean of several, after one that is not counted."""
    act()
    _wait(device_type)
    started = time.perf_counter()
    for _ in range(REPETITIONS):
        act()
    _wait(device_type)
    return (time.perf_counter() - started) / REPETITIONS


def _wait(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.synchronize()


def main(device_type: str) -> None:
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    results = measure_collectives(device_type)
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
