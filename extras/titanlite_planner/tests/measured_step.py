"""One real step of a job on this rank, measured."""

from __future__ import annotations

import torch

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


def measure_step(argv: list[str], ranks: int) -> tuple[tuple[int, int, int], int]:
    """((parameters, gradients, optimizer state), peak) in bytes, of a step after the first.

    The least peak of twelve: gloo's threads may hold a buffer after its collective for a moment.
    """
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

    results, peaks = [], []

    def compute():
        batch = Batch(tokens, tokens)
        results.append(compute_gradients(state, engine, batch, settings=settings))

    kept = measure_allocations(compute)[1]  # the gradients, and what a pipeline receives into
    kept -= resting_bytes(state.model, state.optimizer).gradients
    for _ in range(12):
        finish_step(state, results.pop(), settings)
        before = resting_bytes(state.model, state.optimizer).total
        peaks.append(before + kept + measure_allocations(compute)[0])
    rest = resting_bytes(state.model, state.optimizer)
    return (rest.parameters, rest.gradients, rest.optimizer_state), min(peaks)
