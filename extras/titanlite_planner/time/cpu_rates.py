"""Measure what a process of a CPU sustains while the other processes of a run work, too.

Cores share power, caches and memory, and a virtual core may share a real one. So as many processes
as the run has measure at the same time. A step waits for the slowest of them, and takes mean
seconds, not the best.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titanlite.distributed.collectives import all_gather_tensor
from titanlite_planner.forked import run_in_processes

# Renamed in torch 2.13, where the old name warns.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MATMUL = 1024  # rows and columns of a square matmul
HEADS = (8, 4, 256, 64)  # of attention: sequences, heads, tokens, features
ELEMENTS = 2**21  # of an elementwise operation: 8 MiB in float32
GATHERED = 2**22  # elements of a collective: 16 MiB in float32
COLLECTIVES = 5  # of each kind: a number, not seconds, so that all ranks take part in all of them


@dataclass(frozen=True)
class CpuRates:
    """FLOP/s by dtype, and bytes/s, of one process."""

    matmul: dict[str, float]
    attention: dict[str, float]  # forward, causal
    memory: float  # eager elementwise operations
    link: float  # a ring of gloo between the processes


@dataclass(frozen=True)
class _Stopwatch:
    """Mean seconds of a function, repeated for `seconds`."""

    seconds: float
    clock: Callable[[], float]

    def mean(self, function: Callable[[], object], times: int = 0) -> float:
        """Seconds of one call; `times` calls if that is given."""
        function()
        start, end, calls = self.clock(), time.perf_counter() + self.seconds, 0
        while calls < times or (not times and (not calls or time.perf_counter() < end)):
            function()
            calls += 1
        return max(1e-9, self.clock() - start) / calls


def measure_rates(processes: int, seconds: float, clock: Callable[[], float]) -> CpuRates:
    """The rates of the slowest of `processes`; each rate is measured for `seconds`.

    One process uses torch's threads. Several have a thread each, as torchrun sets it by default.
    More processes than cores are not started: they divide the cores.
    """
    stopwatch = _Stopwatch(seconds, clock)
    if processes == 1:
        return _rates_of_process(stopwatch)
    at_once = max(2, min(processes, os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            partial(_rates_of_rank, stopwatch, rank, at_once, f"{folder}/store")
            for rank in range(at_once)
        ]
        measured = list(run_in_processes(ranks, at_once))
    share = at_once / processes
    return CpuRates(
        {name: share * min(rates.matmul[name] for rates in measured) for name in DTYPES},
        {name: share * min(rates.attention[name] for rates in measured) for name in DTYPES},
        share * min(rates.memory for rates in measured),
        share * min(rates.link for rates in measured),
    )


def _rates_of_rank(stopwatch: _Stopwatch, rank: int, ranks: int, store: str) -> CpuRates:
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    link = _measure_link(stopwatch, ranks)  # first: the ranks begin what follows at the same time
    rates = _rates_of_process(stopwatch)
    dist.barrier()
    dist.destroy_process_group()
    return CpuRates(rates.matmul, rates.attention, rates.memory, link)


def _rates_of_process(stopwatch: _Stopwatch) -> CpuRates:
    matmul = {name: _measure_matmul(stopwatch, dtype) for name, dtype in DTYPES.items()}
    attention = {name: _measure_attention(stopwatch, dtype) for name, dtype in DTYPES.items()}
    memory = _measure_elementwise(stopwatch)
    return CpuRates(matmul, attention, memory, memory)


@torch.no_grad()
def _measure_matmul(stopwatch: _Stopwatch, dtype: torch.dtype) -> float:
    """FLOP/s of the three matmuls of a linear layer: forward, and its two gradients."""
    left, right = torch.randn(2, MATMUL, MATMUL).to(dtype)

    def layer() -> None:
        torch.mm(left, right.mT)
        torch.mm(left, right)
        torch.mm(left.mT, right)

    return 3 * 2 * MATMUL**3 / stopwatch.mean(layer)


@torch.no_grad()
def _measure_attention(stopwatch: _Stopwatch, dtype: torch.dtype) -> float:
    """Causal FLOP/s of attention, forward."""
    query, key, value = torch.randn(3, *HEADS).to(dtype)
    sequences, heads, tokens, features = HEADS
    flops = 2 * sequences * heads * tokens**2 * features
    attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
    return flops / stopwatch.mean(attend)


def _measure_elementwise(stopwatch: _Stopwatch) -> float:
    """Bytes/s of a gated activation, forward and backward, with the allocation of its results.

    Larger memory was freed before, as in training: malloc then returns memory of the heap instead
    of new pages. A copy into memory that was written before is about twice as fast.
    """
    larger = torch.ones(3 * ELEMENTS)
    del larger
    gate, up, gradient = (torch.randn(ELEMENTS, requires_grad=True) for _ in range(3))

    def activation() -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.silu(gate) * up, (gate, up), gradient)

    # tensors read and written: SiLU 2, product 3; its gradients 6, that of SiLU 3, of which the
    # planner counts 8 (`feed_forward_passes`)
    return 13 * gradient.nbytes / stopwatch.mean(activation)


def _measure_link(stopwatch: _Stopwatch, ranks: int) -> float:
    """Bytes/s that each rank sends in an all-gather and in a reduce-scatter."""
    own, group = torch.ones(GATHERED // ranks), dist.group.WORLD
    assert group is not None

    def collectives() -> None:
        stacked = all_gather_tensor(group, own)
        reduce_scatter(torch.empty_like(own), stacked.view(-1), group=group)

    return 2 * own.nbytes * (ranks - 1) / stopwatch.mean(collectives, COLLECTIVES)
