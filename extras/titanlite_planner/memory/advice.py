"""Settings that would lower the memory of a job, with what each saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlite.job import Job
from titanlite.job.read import check_job
from titanlite.runtime.out_of_memory import GIB
from titanlite_planner.job_workload import workload_of
from titanlite_planner.memory.job import estimate_job_memory
from titanlite_planner.recomputation import describe_recomputation
from titanlite_planner.workload import POINTWISE_BUDGET


@dataclass(frozen=True)
class MemorySaving:
    """A change of settings that lowers the peak."""

    settings: str  # as written in the TOML
    bytes: float  # estimated saving on this rank
    cost: str  # in time, precision or machines

    def __str__(self) -> str:
        return f"{self.bytes / GIB:9.3g} GiB  {self.settings}  ({self.cost})"


def memory_savings(job: Job, on_gpu: bool) -> list[MemorySaving]:
    """Valid changes of settings, each alone, with their estimated savings; largest first."""
    before, savings = estimate_job_memory(job).total, []
    for settings, cost, ranks_factor in _candidate_changes(job, on_gpu):
        changed = _apply_change(job, settings, ranks_factor)
        saved = before - estimate_job_memory(changed).total if changed else 0.0
        if saved > before / 1000:
            texts = [f"{key} = {_as_toml(value)}" for key, value in settings.items()]
            texts += ["twice as many ranks"] if ranks_factor > 1 else []
            savings.append(MemorySaving(", ".join(texts), saved, cost))
    return sorted(savings, key=lambda saving: -saving.bytes)


class _Change(NamedTuple):
    """A candidate: changed settings, on `ranks_factor` times as many ranks."""

    settings: dict[str, Any]
    cost: str
    ranks_factor: int = 1


def _candidate_changes(job: Job, on_gpu: bool) -> Iterator[_Change]:
    """Changes that lower the peak; a candidate may be invalid for this job."""
    config = job.config
    training, parallelism, optimizer = config.training, config.parallelism, config.optimizer
    if training.local_batch_size > 1:
        half_batch = {
            "training.local_batch_size": training.local_batch_size // 2,
            "training.global_batch_size": job.global_batch,
        }
        yield _Change(half_batch, "more accumulation steps, the same result")
    mode = config.activation_checkpoint.mode
    if mode == "none" and config.compile.compiles("model"):
        budget = {
            "activation_checkpoint.mode": "memory_budget",
            "activation_checkpoint.memory_budget": POINTWISE_BUDGET,
        }
        yield _Change(budget, "recomputes norms and activation functions, and no matmul")
    if mode != "full":
        full = {"activation_checkpoint.mode": "full"}
        yield _Change(full, "recomputes every block: about a third more compute")
    yield _Change({"loss.chunk_tokens": 1024}, "smaller matmuls")
    if parallelism.fsdp_reshard_after_forward == "never":
        reshard = {"parallelism.fsdp_reshard_after_forward": "default"}
        yield _Change(reshard, "parameters are gathered twice per step")
    if parallelism.fsdp_gradient_reduction == "last_microbatch":
        every = {"parallelism.fsdp_gradient_reduction": "every_microbatch"}
        yield _Change(every, "gradients are reduced after every micro-batch")
    if not optimizer.early_step_in_backward:
        early = {"optimizer.early_step_in_backward": True, "training.max_norm": 0.0}
        yield _Change(early, "gradients are not clipped")
    yield from _lower_precisions(job)
    if on_gpu:
        yield from _offloads()
    shards = parallelism.data_parallel_shard_degree
    more = {} if shards == -1 else {"parallelism.data_parallel_shard_degree": 2 * shards}
    yield _Change(more, "more processes", 2)
    tensor = {"parallelism.tensor_parallel_degree": 2 * job.degrees.tensor}
    yield _Change(tensor, "more processes, which communicate within each block", 2)


def _lower_precisions(job: Job) -> Iterator[_Change]:
    training, optimizer = job.config.training, job.config.optimizer
    restart = "the run must restart from scratch"
    if training.mixed_precision_param == "float32":
        compute = {"training.mixed_precision_param": "bfloat16"}
        yield _Change(compute, "lower compute precision")
    if training.dtype == "float32":
        params = {"training.dtype": "bfloat16"}
        yield _Change(params, f"lower parameter precision; {restart}")
    if optimizer.state_dtype in ("float32", "bfloat16"):
        state = {"optimizer.state_dtype": "8bit"}
        yield _Change(state, f"lower optimizer-state precision; {restart}")


def _offloads() -> Iterator[_Change]:
    activations = {"activation_checkpoint.offload": True}
    yield _Change(activations, "activations are copied to the host and back")
    yield _Change(
        {"optimizer.offload": True}, "optimizer state is copied to the GPU and back every step"
    )
    yield _Change(
        {"training.enable_cpu_offload": True},
        "weights are copied to the GPU, gradients to the host; the optimizer runs on the CPU",
    )


def _apply_change(job: Job, settings: dict[str, Any], ranks_factor: int) -> Job | None:
    """The job with changed settings and `ranks_factor` times the ranks; None if it is invalid."""
    config, ranks = job.config, job.degrees.ranks * ranks_factor
    for key, value in settings.items():
        name, field = key.split(".")
        section = getattr(config, name)
        if all(own.name != field for own in dataclasses.fields(section)):  # of other optimizers
            return None
        section = dataclasses.replace(section, **{field: value})
        config = dataclasses.replace(config, **{name: section})
    elastic = dataclasses.replace(config.elastic, layouts=[])  # the one of the job is in its keys
    return check_job(dataclasses.replace(config, elastic=elastic), ranks)[0]


def _as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def describe_memory(job: Job) -> list[str]:
    """Lines for people: the estimated peak, and settings that would lower it."""
    estimate, savings = estimate_job_memory(job).worst, memory_savings(job, on_gpu=True)
    return [
        f"estimated peak of the largest rank: {estimate.total / GIB:.3g} GiB, of it activations"
        f" {estimate.activations / GIB:.3g}, logits and loss {estimate.logits / GIB:.3g},"
        f" parameters gathered by FSDP {estimate.gathered / GIB:.3g}",
        describe_recomputation(workload_of(job)),
        "settings that would lower it (estimates, each alone):",
        *(f"{saving}" for saving in savings),
    ]
