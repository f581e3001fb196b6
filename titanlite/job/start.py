"""What a run does once, when it starts: restore a checkpoint, and report what it will do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from torch import nn

from titanlite.checkpoint import Checkpointer, FoundCheckpoint
from titanlite.checkpoint.model_state import frozen_weights
from titanlite.data import SampleStream
from titanlite.distributed.collectives import gather_from_all_ranks
from titanlite.distributed.process_group import RankContext
from titanlite.errors import CheckpointError, ConfigError
from titanlite.job.config import JobConfig
from titanlite.job.data import log_mixture, open_job_stream, open_job_tokenizer
from titanlite.job.job import Job
from titanlite.log import logger
from titanlite.metrics import MetricSinks, ThroughputMeter, build_meter
from titanlite.parallelize.lora import unpacked
from titanlite.runtime import RunFolderLock
from titanlite.training.state import Counters, TrainState
from titanlite.training.weight_average import average_of


def log_start(job: Job, rank: int) -> None:
    """On rank 0, print the configuration if job.print_config, and log warnings; log a check."""
    if rank == 0:
        if job.config.job.print_config:
            print(job.as_toml())
        for warning in job.warnings:
            logger.warning("%s", warning)
    if job.config.job.check:
        if rank == 0:  # raises ConfigError if the sources do not suffice
            tokenizer = open_job_tokenizer(job.config)
            stream = open_job_stream(job.config, job.sizes.vocab_size, tokenizer)
            log_mixture(stream, job.batches, job.config.training.steps, Counters())
        logger.info("every check passed for %s", f"{job.degrees}; {job.cost}".removesuffix("; "))


def record_start(
    job: Job,
    checkpointer: Checkpointer,
    lock: RunFolderLock,
    hosts: Sequence[str],
    found: FoundCheckpoint | None,
) -> None:
    """Record the start in the start log; in a crash loop, every rank raises CheckpointError."""
    # of a run that never saves, starts from the same step are no crash loop
    max_crashes = job.config.job.max_crashes if checkpointer.config.saves else 0
    lock.record_start(job.degrees.ranks, found.step if found else 0, max_crashes, hosts)


def restore(
    job: Job,
    checkpointer: Checkpointer,
    state: TrainState,
    stream: SampleStream,
    found: FoundCheckpoint,
    *,
    completely: bool = False,
) -> None:
    """Load a checkpoint into the training state, and set aside later checkpoints of the run.

    `completely`: ignore checkpoint.exclude_from_loading, which applies to starts only.
    """
    average = average_of(state)
    progress = checkpointer.load(
        found,
        state.model,
        state.optimizer,
        job.properties_to_check(stream),
        average=average.tensors if average else None,
        finished_at=job.config.training.steps,
        completely=completely,
    )
    if progress:  # None if only the weights of another run were loaded
        restore_progress(state, progress, found)
        checkpointer.set_aside_later_steps(state.step)


def load_start(
    job: Job,
    checkpointer: Checkpointer,
    state: TrainState,
    stream: SampleStream,
    found: FoundCheckpoint | None,
) -> None:
    """Load the checkpoint that was found; with adapters, first the frozen weights it lacks."""
    if job.config.lora.rank:
        load_base(job, checkpointer, state.model, stream)
        found = None if found and found.initial else found  # it was the base
    if found:
        restore(job, checkpointer, state, stream, found)


def restore_progress(state: TrainState, progress: dict[str, Any], found: FoundCheckpoint) -> None:
    """Restore the progress of a checkpoint, which may be damaged or crafted."""
    try:
        state.restore(progress)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise CheckpointError(
            f"{found.folder}: its progress is not valid ({e!r:.200}).",
            fix="Use an earlier checkpoint (checkpoint.load_step).",
        ).mark_on_all_ranks() from None


def report_start(
    job: Job, state: TrainState, found: FoundCheckpoint | None, sinks: MetricSinks
) -> None:
    """Write events for the checkpoint that the run resumes from and those that were refused."""
    if found:
        for reason in found.refused:
            sinks.event(state.step, "checkpoint_refused", reason=reason)
        event = "loaded" if found.initial else "resumed"
        place = {"path": str(found.folder), "source": "memory" if found.memory else "disk"}
        sinks.event(state.step, event, **place, position=state.position)
        initial = found.initial and job.config.checkpoint.initial_load_model_only
        saved = found.manifest.job if found.manifest and not initial else {}
        if changes := changed_settings(saved, job.config):
            text = ", ".join(f"{k} {old!r:.80} -> {new!r:.80}" for k, (old, new) in changes.items())
            logger.info("changed since the checkpoint: %s", text)
            sinks.event(state.step, "settings_changed", changes=changes)
    steps = job.config.training.steps
    if state.step >= steps:
        logger.info("all %d steps are done; set a larger training.steps to continue", steps)


def load_base(job: Job, checkpointer: Checkpointer, model: nn.Module, stream: SampleStream) -> None:
    """Load the frozen weights of a model with adapters, and pack those that have codes."""
    weights = frozen_weights(model)
    with unpacked(weights, job.config.lora.quantised):
        checkpointer.load_base(weights, job.properties_to_check(stream))


# Sections and keys that decide what a step computes or what the guard does; so do the sections
# that a subclass of JobConfig adds.
_MATHEMATICS = (
    *("model", "training", "attention.mask", "optimizer", "mup", "lr_scheduler", "loss_scale"),
    *("guard", "loss", "experts", "quantize", "lora", "data.mixture", "debug.seed"),
    "weight_average",
)
_NO_MATHEMATICS = (  # keys of these sections that do not
    *("training.local_batch_size", "training.enable_cpu_offload", "training.gc_freq"),
    *("optimizer.implementation", "optimizer.offload", "optimizer.offload_folder"),
    *("optimizer.early_step_in_backward", "loss.chunk_tokens", "model.print_after_conversion"),
    *("weight_average.offload", "weight_average.validate"),
)


def changed_settings(saved: dict[str, Any], current: JobConfig) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, current value)} of the changed settings that decide what a run computes.

    A run that resumes logs them. `saved`: the configuration in a checkpoint, from JSON, which has
    lists where the current one may have tuples; a key that it lacks is not compared.
    """
    changes = {}
    added = vars(current).keys() - JobConfig.__dataclass_fields__.keys()
    flat_saved = _flatten_settings(saved)
    flat_current = _flatten_settings(json.loads(json.dumps(dataclasses.asdict(current))))
    for key in sorted(flat_saved.keys() & flat_current.keys()):
        decides = any(f"{key}.".startswith(f"{part}.") for part in (*_MATHEMATICS, *added))
        if decides and flat_saved[key] != flat_current[key] and key not in _NO_MATHEMATICS:
            changes[key] = (flat_saved[key], flat_current[key])
    return changes


def _flatten_settings(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted key: value} of nested tables."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        flat |= _flatten_settings(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def build_run_meter(job: Job, rank: RankContext) -> ThroughputMeter:
    """The throughput meter; logs the job's summary, which shows the peak that it found."""
    meter = build_meter(
        flops_per_token=job.flops_per_token,
        dtype=job.transforms.compute_dtype,
        devices=rank.world_size,
        device=rank.device,
    )
    logger.info("%s", job.summary(rank.device, meter.peak_flops))
    if rank.device.type == "cpu":
        check_compute_dtypes(job.config.training.mixed_precision_param)
    return meter


def check_compute_dtypes(own: str) -> None:
    """Refuse ranks whose "auto" chose different compute dtypes; call it on all ranks together."""
    dtypes = gather_from_all_ranks(own)
    if other := next((rank for rank, dtype in enumerate(dtypes) if dtype != dtypes[0]), 0):
        raise ConfigError(
            f'training.mixed_precision_param = "auto": rank 0 computes in {dtypes[0]} and rank'
            f" {other} in {dtypes[other]}, because only one of their CPUs has bfloat16 units.",
            fix='Set it to "bfloat16" or "float32".',
        ).mark_on_all_ranks()


def advise_on_memory(config: JobConfig, on_gpu: bool) -> list[str]:
    """Lines for an out-of-memory error: settings that need less memory and are not in use."""
    training, recompute = config.training, config.activation_checkpoint
    optimizer, chunk = config.optimizer, config.loss.chunk_tokens
    half = training.local_batch_size // 2
    settings = [
        (half > 0, f"training.local_batch_size = {half} with the same training.global_batch_size"),
        (recompute.mode != "full", 'activation_checkpoint.mode = "full"'),
        (chunk == 0 or chunk > 1024, "loss.chunk_tokens = 1024"),
        (on_gpu and not recompute.offload, "activation_checkpoint.offload = true"),
        (on_gpu and not optimizer.offload, "optimizer.offload = true"),
        (True, "more ranks, for FSDP or tensor parallelism"),
    ]
    command = "python -m titanlite_planner memory --job.config_file RUN.toml --job.check_ranks N"
    return [
        "  settings that need less memory:",
        *(f"    {text}" for helps, text in settings if helps),
        f"  how much each saves: {command}",
    ]
