"""The table of a dry run: one part for each kind of rank."""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator

from titanlite.job import Job
from titanlite.log import pluralize
from titanlite.runtime.out_of_memory import GIB
from titanlite.settings import raise_together
from titanlite_planner.dry_run.ranks import RankStep, check_dry_run, dry_run
from titanlite_planner.job_workload import workload_of
from titanlite_planner.recomputation import describe_recomputation


def report_dry_run(job: Job) -> Iterator[str]:
    """Run the job dry and yield lines for people; raises what the job cannot run with."""
    raise_together(list(check_dry_run(job)))
    began = time.perf_counter()
    ranks = pluralize(job.degrees.ranks, "rank")
    yield f"dry run: {job.degrees}, {ranks}; bytes are those of one rank, in eager mode and without"
    yield "the allocator's overhead"
    if not (job.config.lora.rank or any(b.state for b in job.spec.counts(job.sizes).blocks)):
        # of adapters and linear attention, the formulas know nothing
        yield describe_recomputation(dataclasses.replace(workload_of(job), compiled=False))
    steps: list[RankStep] = []
    for step in dry_run(job):
        steps.append(step)
        yield ""
        yield from _describe(step)
    worst = max(steps, key=lambda step: step.peak_bytes)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the largest one
    yield ""
    yield (
        f"largest peak: {worst.peak_bytes / GIB:.2f} GiB, on pipeline rank {worst.pipeline_rank};"
        f" took {time.perf_counter() - began:.0f} s, {max(own, children) * 1024 / GIB:.2f} GiB for"
        " the largest process"
    )


def _describe(step) -> Iterator[str]:
    ranks = ", ".join(map(str, step.same_kind))
    yield f"pipeline rank {ranks}: {step.modules}"
    rest = step.resting
    yield (
        f"  at rest    {rest.total / GIB:8.3f} GiB: parameters {rest.parameters / GIB:.3f},"
        f" gradients {rest.gradients / GIB:.3f}, optimizer state {rest.optimizer_state / GIB:.3f}"
    )
    yield f"  peak       {step.peak_bytes / GIB:8.3f} GiB, in the phase {step.peak_phase}:"
    alive = sorted(step.alive_at_peak.items(), key=lambda item: -item[1])
    for label, size in alive:
        if size > step.peak_bytes / 1000:
            yield f"             {size / GIB:8.3f} GiB  {label}"
    yield f"  compute    {step.flops / 1e12:8.3f} TFLOP"
    yield "  collectives: dimension, type, calls, bytes of their largest tensors"
    order = sorted(step.collectives.items(), key=lambda item: -item[1].bytes)
    for kind, total in order:
        yield f"    {kind.dimension:28} {kind.name:15} {total.calls:8,} {total.bytes:20,}"
