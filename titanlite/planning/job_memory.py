"""The memory of a job: the estimate of its workload, with the exact parameters and states."""

from __future__ import annotations

from titanlite.job import Job
from titanlite.planning.job_workload import workload_of
from titanlite.planning.memory import MemoryEstimate, StageParts, estimate_memory


def estimate_job_memory(job: Job) -> MemoryEstimate:
    """The memory of every pipeline rank of a job."""
    on_cpu = job.config.job.device == "cpu"
    return estimate_memory(workload_of(job), stages=_stages(job), on_cpu=on_cpu)


def _stages(job: Job) -> tuple[StageParts, ...]:
    prefix, first, stages = f"{job.spec.blocks_path}.", 0, []
    for names in job.pipeline.stages:
        blocks = sum(name.startswith(prefix) for name in names)
        ends = {name for name in names if not name.startswith(prefix)}
        output = job.spec.output_path in ends
        embedding = "tok_embeddings" in ends
        stages.append(StageParts(first, blocks, embedding, "norm" in ends, output))
        first += blocks
    return tuple(stages)
