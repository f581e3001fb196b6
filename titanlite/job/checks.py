"""Checks of a whole configuration; those of its data and device are in `environment.py`."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.checkpoint import check_checkpoint_config
from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError, UserError
from titanlite.job import option_checks
from titanlite.job.config import JOB_PROPERTIES, JobConfig
from titanlite.metrics import check_metrics_config, check_profiling_config
from titanlite.models import ModelSizes
from titanlite.optim import (
    RateSchedule,
    ScheduleLength,
    StepSpan,
    build_rate_schedule,
    check_lr_scheduler_config,
    check_optimizer_config,
    check_schedule_end,
)
from titanlite.parallelize.activation_checkpoint import check_activation_checkpoint
from titanlite.parallelize.context import check_context_parallel
from titanlite.parallelize.tensor import check_tensor_parallel
from titanlite.training.batch_schedule import BatchSchedule, build_batch_schedule


def check_sections(config: JobConfig) -> Iterator[UserError]:
    """Yield the problems that depend neither on the model nor on the number of ranks."""
    yield from check_activation_checkpoint(
        config.activation_checkpoint, config.compile.compiles("model")
    )
    yield from check_checkpoint_config(config.checkpoint)
    for name in sorted(set(config.checkpoint.allow_changes) - set(JOB_PROPERTIES)):
        yield ConfigError(
            f'checkpoint.allow_changes: "{name}" is not a property that checkpoints are checked'
            " against.",
            fix=f"Use {', '.join(JOB_PROPERTIES)}.",
        )
    if config.job.time_limit_minutes and not config.checkpoint.saves:
        yield ConfigError(
            f"job.time_limit_minutes = {config.job.time_limit_minutes:g}:"
            f" {config.checkpoint.why_not_saved}, so nothing would be saved when the time limit is"
            " reached.",
            fix="Set checkpoint.enable = true and load_only = false, or remove"
            " job.time_limit_minutes.",
        )
    yield from check_metrics_config(config.metrics)
    yield from check_profiling_config(config.profiling)
    yield from check_optimizer_config(config.optimizer, config.training.dtype)
    yield from option_checks.check_guard(config)
    yield from option_checks.check_update_options(config)
    group_settings = [group.schedule_overrides() for group in config.optimizer.groups]
    yield from check_lr_scheduler_config(config.lr_scheduler, group_settings)
    yield from _check_precision(config)
    yield from config.find_problems()


def check_sequence_lengths(
    config: JobConfig, sizes: ModelSizes, degrees: Degrees
) -> Iterator[UserError]:
    """Reject sequence lengths that the layout cannot shard, or that have too many positions."""
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    unique = {}  # by message: some problems do not depend on the length
    for key, seq_len in lengths.items():
        problems = [*check_tensor_parallel(degrees, sizes, seq_len, key)]
        conv_width = getattr(sizes, "conv_width", 1)
        problems += check_context_parallel(degrees, config.parallelism, seq_len, key, conv_width)
        problems += _check_positions(sizes, seq_len, key)
        unique.update({str(problem): problem for problem in problems})
    yield from unique.values()


def _check_positions(sizes: ModelSizes, seq_len: int, key: str) -> Iterator[ConfigError]:
    """Reject sequences that are longer than a learned position embedding."""
    positions = getattr(sizes, "positions", 0)
    if positions and seq_len > positions:
        yield ConfigError(
            f"{key} = {seq_len}: the model has learned positions for {positions} tokens.",
            fix=f"Set {key} = {positions} or less, or a larger model.positions.",
        )


def _check_precision(config: JobConfig) -> Iterator[ConfigError]:
    """Reject a training.dtype (parameters) that does not fit mixed_precision_param (compute)."""
    compute, params = config.training.mixed_precision_param, config.training.dtype
    if compute == "float16" and params != "float32":
        yield ConfigError(
            f'training.dtype = "{params}" with training.mixed_precision_param = "float16": float16'
            " compute requires float32 parameters.",
            fix='Set training.dtype = "float32", or training.mixed_precision_param = "bfloat16".',
        )


def build_job_schedule(config: JobConfig, batches: BatchSchedule) -> RateSchedule:
    """The schedule of the learning rate and the weight decay."""
    steps = config.training.steps
    return build_rate_schedule(
        config.lr_scheduler, ScheduleLength(steps, batches.tokens_after(steps))
    )


def check_end_of_schedule(config: JobConfig, degrees: Degrees | None) -> Iterator[ConfigError]:
    """Reject a run whose last steps have learning rate 0."""
    steps = config.training.steps
    try:
        global_batch = config.training.sequences_per_step((degrees or Degrees()).batch)
        batches = build_batch_schedule(config.training, global_batch)
    except ConfigError as error:
        if degrees is None:  # otherwise check_batch_size reports it
            yield error
        return
    if degrees is None and config.lr_scheduler.in_tokens:  # the batch may depend on the layout
        return
    tokens = batches.tokens_after(steps - 1)
    last = StepSpan(steps - 1, tokens, batches.batch_at(tokens) * batches.seq_len)
    yield from check_schedule_end(build_job_schedule(config, batches), steps, last)
