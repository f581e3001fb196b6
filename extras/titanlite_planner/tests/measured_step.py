"""One real step of a job on this rank, measured."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.parallelize.memory import measure_allocations
from titanlite.distributed.mesh import build_mesh
from titanlite.job import read_job
from titanlite.job.build import build_state, build_step_settings
from titanlite.parallelize import ParallelLayout, build_parallel_modules
from titanlite.training.batch import Batch
from titanlite.training.engine import build_engine
from titanlite.training.state import Counters
from titanlite.training.step import compute_gradients, finish_step
from titanlite_planner.dry_run.ranks import resting_bytes

# those of FSDP: in torch 2.13, and before
COLLECTIVES = [
    name
    for name in (
        *("all_gather_single", "reduce_scatter_single", "all_reduce"),
        *("all_gather_into_tensor", "reduce_scatter_tensor"),
    )
    if hasattr(dist, name)
]


def _without_buffers_of_gloo(collective):
    """`collective`, with nothing of gloo's own in a profile of this thread's memory.

    gloo copies the input, and its thread may free the copy, or the input itself: the profiler
    misses that, and would count them to the end of the step. So another thread, without a profiler,
    runs the collective, and this one goes on when nothing of gloo holds the tensors.
    """

    def run(*args, **kwargs):
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        holders = [torch._C._storage_Use_Count(storage) for storage in storages]
        with ThreadPoolExecutor(1) as other:
            work = other.submit(torch.no_grad()(collective), *args, **kwargs).result()
        assert work is None, "an asynchronous collective holds its buffers itself"
        while [torch._C._storage_Use_Count(storage) for storage in storages] != holders:
            time.sleep(0)

    return run


def measure_step(argv: list[str], ranks: int) -> tuple[tuple[int, int, int], int]:
    """((parameters, gradients, optimizer state), peak) in bytes, of the second step."""
    job = read_job(argv, ranks, here=False)
    mesh, cpu = build_mesh(job.degrees, "cpu"), torch.device("cpu")
    layout = ParallelLayout(mesh, job.config.parallelism, job.pipeline)
    modules = build_parallel_modules(job.spec, job.sizes, layout, job.transforms)
    model = modules.materialize(cpu, seed=0)
    local_batch = job.config.training.local_batch_size
    engine = build_engine(model, layout, cpu, local_batch=local_batch)
    state, in_backward = build_state(job, model, mesh, Counters())
    settings = build_step_settings(job, state, mesh, in_backward)
    tokens = torch.zeros((job.rank_batch, job.config.training.seq_len), dtype=torch.int64)

    results = []

    def compute():
        batch = Batch(tokens, tokens)
        results.append(compute_gradients(state, engine, batch, settings=settings))

    released = {name: _without_buffers_of_gloo(getattr(dist, name)) for name in COLLECTIVES}
    with patch.multiple(dist, **released):
        kept = measure_allocations(compute)[1]  # the gradients, and what a pipeline receives into
        kept -= resting_bytes(state.model, state.optimizer).gradients
        finish_step(state, results.pop(), settings)
        before = resting_bytes(state.model, state.optimizer).total
        peak = before + kept + measure_allocations(compute)[0]
    rest = resting_bytes(state.model, state.optimizer)
    return (rest.parameters, rest.gradients, rest.optimizer_state), peak
