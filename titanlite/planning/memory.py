"""What a rank holds, and what would make it less: said to whoever has run out of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from titanlite.distributed.mesh import resolve_degrees
from titanlite.errors import UserError
from titanlite.job import Job, JobConfig, problems_of
from titanlite.optim import moment_bytes
from titanlite.parallelize import DTYPES
from titanlite.runtime.out_of_memory import MemoryUsage, find_memory_request

GIB = 2**30
SHOWN = 6  # ways out, the best first


@dataclass(frozen=True)
class MemoryEstimate:
    """About how many bytes a rank holds at its fullest; counted from sizes, not measured."""

    weights: float  # its shards
    gradients: float
    moments: float
    gathered: float  # weights and gradients that are whole for a while
    activations: float
    logits: float  # with the loss

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def estimate_memory(job: Job) -> MemoryEstimate:
    """What the fullest kind of rank holds, on the device it computes on."""
    config, degrees, sizes = job.config, job.degrees, job.sizes
    parallelism, training = config.parallelism, config.training
    whole = job.spec.count_parameters(sizes) / degrees.tensor / degrees.pipeline
    shards = degrees.shard * degrees.context
    blocks = sizes.n_layers / degrees.pipeline
    block = job.spec.count_block_parameters(sizes) / degrees.tensor
    keep, compute = DTYPES[training.dtype].itemsize, job.transforms.compute.itemsize
    reduce = job.transforms.reduce.itemsize
    ends = (whole - block * blocks) / 2  # what is before the blocks or after them

    elements = whole / shards
    weights, gradients = elements * keep, elements * keep
    moments = 0.0 if config.optimizer.offload else elements * _bytes_a_moment(config)
    if training.enable_cpu_offload:
        weights = gradients = moments = 0.0
    if config.optimizer.early_step_in_backward:
        gradients = block / shards * keep

    pipelined = degrees.pipeline > 1
    stay = parallelism.fsdp_reshard_after_forward == "never" or (
        pipelined and parallelism.fsdp_reshard_after_forward == "default"
    )
    gathered = (whole if stay else 2 * block + ends) * compute + max(block, ends) * reduce
    times = job.rows // training.local_batch_size
    if times > 1 and parallelism.fsdp_gradient_reduction == "last_microbatch":
        gathered += whole * reduce  # they add up whole

    at_once = job.pipeline.microbatch if pipelined else training.local_batch_size
    tokens = at_once * training.seq_len / degrees.context
    in_flight = ends_in_flight = 1  # micro-batches, in the first and in the last stage
    if pipelined:
        most = job.pipeline.microbatches
        all_first = job.pipeline.schedule in ("GPipe", "LoopedBFS")
        in_flight = most if all_first else min(most, degrees.pipeline)
        ends_in_flight = most if all_first else 1
    vocabulary = sizes.vocab_size
    if not parallelism.disable_loss_parallel:
        vocabulary /= degrees.tensor
    chunk = min(tokens, config.loss.chunk_tokens or tokens)
    # logits in fp32 and as they come; of each micro-batch, the gradient of the weights that made them
    loss = chunk * (4 + (compute if compute < 4 else 0))
    in_fp32 = chunk < tokens or job.transforms.compute == torch.float16
    loss += ends_in_flight * sizes.dim * (4 if in_fp32 else compute)
    return MemoryEstimate(
        weights,
        gradients,
        moments,
        gathered,
        activations=in_flight * tokens / degrees.tensor * _kept(job, blocks) * compute,
        logits=vocabulary * loss,
    )


def _bytes_a_moment(config: JobConfig) -> float:
    """Bytes of the moments of one element of a large matrix."""
    optimizer = config.optimizer
    keep = DTYPES[config.training.dtype].itemsize
    if optimizer.name == "SGD":
        return keep if optimizer.momentum else 0.0
    if optimizer.state_dtype == "float32":
        return 2 * keep
    return moment_bytes((1, 1024), optimizer.state_dtype) / 1024


def _kept(job: Job, blocks: float) -> float:
    """Numbers a token that `blocks` blocks hold when backward begins."""
    recompute, whole = job.config.activation_checkpoint, job.spec.kept_by_block(job.sizes)
    if recompute.offload:  # two blocks' are here, and one is computed again
        return 2 * job.sizes.dim + whole if recompute.mode == "full" else 2 * whole
    if recompute.mode == "none":
        return blocks * whole
    if recompute.mode == "memory_budget":
        return blocks * whole * recompute.memory_budget
    if recompute.per_operation:
        return blocks * whole * 0.4  # 34 of 87 MB were measured
    every = 1 if recompute.mode == "full" else int(recompute.selective_ac_option)
    again = blocks / every
    return again * job.sizes.dim + (blocks - again) * whole + whole  # one is computed again


# --- what would help -----------------------------------------------------------------------------


@dataclass(frozen=True)
class MemorySaving:
    """One way out."""

    words: str  # what to write
    bytes: float  # fewer on this rank, about
    cost: str  # what it takes instead

    def __str__(self) -> str:
        return f"{self.bytes / GIB:9.3g} GiB  {self.words}  ({self.cost})"


def memory_savings(job: Job, on_gpu: bool) -> list[MemorySaving]:
    """Each change to a job that it may make, alone, and what that saves; the largest first."""
    before, found = estimate_memory(job).total, []
    for keys, times, cost in _changes(job, on_gpu):
        changed = _changed(job, keys, times)
        saved = before - estimate_memory(changed).total if changed else 0.0
        if saved > before / 1000:
            said = [f"{key} = {_toml(value)}" for key, value in keys.items()]
            said += ["twice as many ranks"] if times > 1 else []
            found.append(MemorySaving(", ".join(said), saved, cost))
    return sorted(found, key=lambda saving: -saving.bytes)


def _changes(job: Job, on_gpu: bool) -> Iterator[tuple[dict[str, Any], int, str]]:
    """Settings that make room, on how many times as many ranks, and what they cost."""
    config, degrees = job.config, job.degrees
    training, parallelism, optimizer = config.training, config.parallelism, config.optimizer
    if training.local_batch_size > 1:
        half = {"training.local_batch_size": training.local_batch_size // 2}
        half["training.global_batch_size"] = job.global_batch
        yield half, 1, "more micro-batches a step, the same mathematics"
    if config.activation_checkpoint.mode != "full":
        yield {"activation_checkpoint.mode": "full"}, 1, "a third more computing"
    yield {"loss.chunk_tokens": 1024}, 1, "smaller matrix products"
    if training.mixed_precision_param == "float32":
        yield {"training.mixed_precision_param": "bfloat16"}, 1, "computes with fewer digits"
    if training.dtype == "float32":
        yield {"training.dtype": "bfloat16"}, 1, "learns with fewer digits, begun anew"
    if optimizer.name != "SGD" and optimizer.state_dtype in ("float32", "bfloat16"):
        yield {"optimizer.state_dtype": "8bit"}, 1, "moments of fewer digits, begun anew"
    if parallelism.fsdp_reshard_after_forward == "never":
        yield {"parallelism.fsdp_reshard_after_forward": "default"}, 1, "weights are gathered twice"
    if parallelism.fsdp_gradient_reduction == "last_microbatch":
        every = {"parallelism.fsdp_gradient_reduction": "every_microbatch"}
        yield every, 1, "gradients are reduced more often"
    if not optimizer.early_step_in_backward:
        early = {"optimizer.early_step_in_backward": True, "training.max_norm": 0.0}
        yield early, 1, "gradients are not clipped"
    if on_gpu:
        yield {"activation_checkpoint.offload": True}, 1, "activations travel to the host and back"
        yield {"optimizer.offload": True}, 1, "moments travel at each step"
        yield {"training.enable_cpu_offload": True}, 1, "weights and gradients travel, too"
    shards = parallelism.data_parallel_shard_degree
    more = {} if shards == -1 else {"parallelism.data_parallel_shard_degree": 2 * shards}
    yield more, 2, "more processes"
    split = {"parallelism.tensor_parallel_degree": 2 * degrees.tensor}
    yield split, 2, "more processes, which talk within each block"


def _changed(job: Job, keys: dict, times: int) -> Job | None:
    """The job with other settings on `times` as many ranks; None where it may not be so."""
    config, ranks = job.config, job.degrees.ranks * times
    for key, value in keys.items():
        section, name = key.split(".")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    if any(True for _ in problems_of(config, ranks)):
        return None
    return dataclasses.replace(
        job, config=config, degrees=resolve_degrees(config.parallelism, ranks)
    )


def _toml(value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


# --- saying it -----------------------------------------------------------------------------------


@contextmanager
def explain_out_of_memory(
    job: Job, device: torch.device, place: Callable[[], str]
) -> Iterator[MemoryUsage]:
    """Turn running out of memory into what the user can do about it.

    Yields a record that is told of the model and optimizer once they are there; `place` says
    what is being done.
    """
    held = MemoryUsage(device)
    try:
        yield held
    except (MemoryError, RuntimeError) as error:
        wanted = find_memory_request(error)
        if wanted is None:
            raise
        raise UserError(_advice(job, held, place(), wanted)) from error


def _advice(job: Job, held: MemoryUsage, place: str, wanted: str) -> str:
    counted, peak = held.bytes(), held.peak()
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in counted.items())
    about = estimate_memory(job)
    ways = memory_savings(job, held.device.type == "cuda")
    lines = [
        f"out of memory in {place}: {wanted}; {peak / GIB:.3g} GiB{held.limit()} was held at most.",
        f"  counted, in GiB: {parts}; about, at the fullest: activations"
        f" {about.activations / GIB:.3g}, logits and loss {about.logits / GIB:.3g}, gathered for"
        f" computing {about.gathered / GIB:.3g}",
        "  what would make room on this rank, each alone, about:",
        *(f"  {way}" for way in ways[:SHOWN]),
    ]
    return "\n".join(lines if ways else lines[:-1])
