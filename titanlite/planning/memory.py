"""Estimate the memory of a rank, and find settings that would lower it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from titanlite.distributed.mesh import resolve_degrees
from titanlite.job import Job, check_config
from titanlite.optim import MatrixFacts, optimizer_state_bytes, whole_matrix_bytes
from titanlite.runtime.out_of_memory import GIB

MAX_ADVICE = 6  # settings shown, the largest saving first


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes on a rank's device at the peak of a step."""

    parameters: float  # this rank's shards
    gradients: float
    optimizer_state: float
    gathered: float  # unsharded parameters and gradients of the modules that FSDP has gathered
    activations: float
    logits: float  # and the other tensors of the loss
    whole_matrices: float  # of the optimizer's step, beyond the three before, which are free then

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def estimate_memory(job: Job) -> MemoryEstimate:
    """The estimate for the rank that needs most memory."""
    config, degrees, sizes = job.config, job.degrees, job.sizes
    training, transforms = config.training, job.transforms
    stage_parameters = job.spec.count_parameters(sizes) / degrees.tensor / degrees.pipeline
    blocks = sizes.n_layers / degrees.pipeline
    block = job.spec.count_block_parameters(sizes) / degrees.tensor
    param_bytes = transforms.param_dtype.itemsize
    ends = (stage_parameters - block * blocks) / 2  # parameters of the embedding or output layer

    shard = stage_parameters / (degrees.shard * degrees.context)
    parameters, gradients = shard * param_bytes, shard * param_bytes
    moments = shard * _state_bytes_per_element(job)
    if training.enable_cpu_offload:
        parameters = gradients = moments = 0.0
    if config.optimizer.early_step_in_backward:
        gradients = block / (degrees.shard * degrees.context) * param_bytes

    compute_bytes, reduce_bytes = (
        transforms.compute_dtype.itemsize,
        transforms.reduce_dtype.itemsize,
    )
    unsharded = stage_parameters if _stays_gathered(job) else 2 * block + ends
    gathered = unsharded * compute_bytes + max(block, ends) * reduce_bytes
    accumulates = job.rank_batch > training.local_batch_size
    reduction = config.parallelism.fsdp_gradient_reduction
    if accumulates and reduction == "last_microbatch":
        gathered += stage_parameters * reduce_bytes  # gradients accumulate unsharded
    activations, logits = _activation_bytes(job, blocks), _logits_bytes(job)
    whole_matrices = whole_matrix_bytes(_shapes(job), config.optimizer, _facts(job))
    return MemoryEstimate(
        parameters,
        gradients,
        moments,
        gathered,
        activations,
        logits,
        whole_matrices=max(0.0, whole_matrices - gathered - activations - logits),
    )


def _stays_gathered(job: Job) -> bool:
    """Whether parameters stay unsharded from forward to backward."""
    reshard = job.config.parallelism.fsdp_reshard_after_forward
    return reshard == "never" or (reshard == "default" and job.degrees.pipeline > 1)


def _microbatch_tokens(job: Job) -> float:
    """Tokens of one forward pass on one rank."""
    pipelined, training = job.degrees.pipeline > 1, job.config.training
    sequences = job.pipeline.microbatch_size if pipelined else training.local_batch_size
    return sequences * training.seq_len / job.degrees.context


def _microbatches_in_flight(job: Job) -> tuple[int, int]:
    """Micro-batches whose activations are alive in the first stage, and in the last."""
    if job.degrees.pipeline == 1:
        return 1, 1
    microbatches = job.pipeline.n_microbatches
    if job.pipeline.schedule in ("GPipe", "LoopedBFS"):  # all forwards come first
        return microbatches, microbatches
    return min(microbatches, job.degrees.pipeline), 1


def _activation_bytes(job: Job, blocks: float) -> float:
    """Bytes of the activations of `blocks` blocks, for all micro-batches in flight."""
    in_flight, _ = _microbatches_in_flight(job)
    tokens = in_flight * _microbatch_tokens(job) / job.degrees.tensor
    return tokens * _saved_elements_per_token(job, blocks) * job.transforms.compute_dtype.itemsize


def _logits_bytes(job: Job) -> float:
    """Bytes of the logits, and of the gradient of the output layer's weight."""
    config, compute = job.config, job.transforms.compute_dtype
    vocabulary = float(job.sizes.vocab_size)  # of the logits on this rank
    if not config.parallelism.disable_loss_parallel:
        vocabulary /= job.degrees.tensor
    tokens = _microbatch_tokens(job)
    chunk = min(tokens, config.loss.chunk_tokens or tokens)
    # The logits in fp32 and in the compute dtype; for each micro-batch in flight, the gradient of
    # the output layer's weight.
    bytes_per_id = chunk * (4 + (compute.itemsize if compute.itemsize < 4 else 0))
    in_fp32 = chunk < tokens or compute == torch.float16
    _, in_flight = _microbatches_in_flight(job)
    bytes_per_id += in_flight * job.sizes.dim * (4 if in_fp32 else compute.itemsize)
    return vocabulary * bytes_per_id


def _state_bytes_per_element(job: Job) -> float:
    """Mean bytes of optimizer state per parameter element."""
    shapes, dtype = _shapes(job), job.transforms.param_dtype
    total = optimizer_state_bytes(shapes, job.config.optimizer, dtype, _facts(job))
    return total / sum(shape.numel() for _, shape in shapes)


def _shapes(job: Job) -> list[tuple[str, torch.Size]]:
    """(name, shape) of each parameter of the whole model."""
    with torch.device("meta"):
        model = job.spec.build(job.sizes)
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


def _facts(job: Job) -> MatrixFacts:
    return MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)


def _saved_elements_per_token(job: Job, blocks: float) -> float:
    """Activation elements per token that are alive for `blocks` blocks when backward begins."""
    recompute = job.config.activation_checkpoint
    block, dim = job.spec.activations_per_block(job.sizes), job.sizes.dim
    if recompute.offload:  # only two blocks' activations are on the device
        return 2 * dim + block if recompute.mode == "full" else 2 * block
    if recompute.mode == "none":
        return blocks * block
    if recompute.mode == "memory_budget":
        return blocks * block * recompute.memory_budget
    if recompute.per_operation:
        return blocks * block * 0.4  # measured: 34 MB instead of 87 MB
    every = 1 if recompute.mode == "full" else int(recompute.selective_ac_option)
    recomputed = blocks / every
    # block inputs, activations of the other blocks, and of the block that is being recomputed
    return recomputed * dim + (blocks - recomputed) * block + block


# --- advice --------------------------------------------------------------------------------------


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
    before, savings = estimate_memory(job).total, []
    for settings, cost, ranks_factor in _candidate_changes(job, on_gpu):
        changed = _apply_change(job, settings, ranks_factor)
        saved = before - estimate_memory(changed).total if changed else 0.0
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
    if config.activation_checkpoint.mode != "full":
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
    every_step = "copied to the GPU and back every step"
    activations = {"activation_checkpoint.offload": True}
    yield _Change(activations, "activations are copied to the host and back")
    yield _Change({"optimizer.offload": True}, f"optimizer state is {every_step}")
    yield _Change(
        {"training.enable_cpu_offload": True},
        f"parameters, gradients and optimizer state are {every_step}",
    )


def _apply_change(job: Job, settings: dict[str, Any], ranks_factor: int) -> Job | None:
    """The job with changed settings and `ranks_factor` times the ranks; None if it is invalid."""
    config, ranks = job.config, job.degrees.ranks * ranks_factor
    for key, value in settings.items():
        name, field = key.split(".")
        section = dataclasses.replace(getattr(config, name), **{field: value})
        config = dataclasses.replace(config, **{name: section})
    if any(True for _ in check_config(config, ranks)):
        return None
    return dataclasses.replace(
        job, config=config, degrees=resolve_degrees(config.parallelism, ranks)
    )


def _as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def advise_on_memory(job: Job, on_gpu: bool) -> list[str]:
    """Lines for an out-of-memory error: the estimated peak, and settings that would lower it."""
    estimate, savings = estimate_memory(job), memory_savings(job, on_gpu)
    lines = [
        f"  estimated at the peak, in GiB: activations {estimate.activations / GIB:.3g}, logits and"
        f" loss {estimate.logits / GIB:.3g}, parameters gathered by FSDP"
        f" {estimate.gathered / GIB:.3g}",
        "  settings that would free memory on this rank (estimates, each alone):",
        *(f"  {saving}" for saving in savings[:MAX_ADVICE]),
    ]
    return lines if savings else lines[:1]
