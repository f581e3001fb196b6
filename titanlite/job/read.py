"""Read a job from a command line, and check it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from titanlite.distributed.mesh import resolve_degrees
from titanlite.elastic.layouts import check_elastic_job
from titanlite.errors import ConfigError, UserError
from titanlite.job import checks
from titanlite.job.config import JobConfig
from titanlite.job.environment import check_environment, device_type
from titanlite.job.job import Job
from titanlite.job.option_checks import (
    check_lora,
    check_model_options,
    check_sharded_options,
    check_update_degrees,
)
from titanlite.job.torchtitan_keys import MOVED, complete_table
from titanlite.kernels.backend import check_attention_config
from titanlite.metrics import cpu_has_bf16_units
from titanlite.models import FAMILIES
from titanlite.parallelize import ModelTransforms
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite.settings import load_config, raise_together
from titanlite.training.batch_schedule import check_batch_size


def resolve_compute_dtype(config: JobConfig, elsewhere: bool) -> JobConfig:
    """Replace "auto" in training.mixed_precision_param by the dtype for the device of the job.

    `elsewhere`: the job is for another machine, which has GPUs unless job.device is "cpu".
    """
    if config.training.mixed_precision_param != "auto":
        return config
    on_cpu = config.job.device == "cpu" or (not elsewhere and device_type(config) == "cpu")
    dtype: Any = "float32" if on_cpu and not cpu_has_bf16_units() else "bfloat16"
    training = dataclasses.replace(config.training, mixed_precision_param=dtype)
    return dataclasses.replace(config, training=training)


def read_job(
    argv: Sequence[str],
    world_size: int,
    *,
    here: bool = True,
    config_type: type[JobConfig] = JobConfig,
) -> Job:
    """Read the job of a command line and check it for `world_size` ranks; raises all problems.

    `here`: the job is to run on this machine, so its data and its device must exist.
    `config_type`: JobConfig, or with further sections.
    """
    config, refused = load_config(config_type, argv, MOVED, complete_table)
    elsewhere = bool(config.job.check_ranks) or not here
    config = resolve_compute_dtype(config, elsewhere)
    job, problems = check_job(config, config.job.check_ranks or world_size)
    if here:
        problems += check_environment(config, job.sizes if job else None)
    # A refused key has its default value now: problems of it, or of what it decides, mean nothing.
    refused_keys = {key for problem in refused for key in problem.keys}
    undecided = {  # sections whose keys depend on a refused one
        text.partition(".")[0]
        for text in map(str, refused)
        if re.match(r"\w+\.name = |parallelism\.\w+_degree = ", text)
    }

    def is_meant(problem: UserError) -> bool:
        return not any(k in refused_keys or k.split(".")[0] in undecided for k in problem.keys)

    raise_together([*refused, *filter(is_meant, problems)])
    assert job is not None
    return job


def check_job(config: JobConfig, ranks: int) -> tuple[Job | None, list[UserError]]:
    """(the job on `ranks` ranks, []) or (None, its problems); data and device are not checked."""
    if config.elastic.enable:
        return check_elastic_job(config, ranks, _check_layout)
    return _check_layout(config, ranks)


def _check_layout(config: JobConfig, ranks: int) -> tuple[Job | None, list[UserError]]:
    problems = list(checks.check_sections(config))
    spec, context = FAMILIES[config.model.name], config.parallelism.context_parallel_degree
    tokenizer, sinks = config.data.tokenizer, spec.attention_sinks
    problems += check_attention_config(config.attention, context, tokenizer, sinks)
    sizes = plan = degrees = None
    try:
        sizes = spec.sizes_of(config.model)
        problems += spec.find_size_problems(sizes)
        problems += check_model_options(config, spec, sizes)
        transforms = ModelTransforms(config.activation_checkpoint, compile=config.compile)
        plan, pipeline_problems = plan_pipeline(
            config.parallelism,
            spec,
            sizes,
            config.training.seq_len,
            config.training.local_batch_size,
            transforms.splits_backward,
        )
        problems += pipeline_problems
    except ConfigError as error:
        problems.append(error)
    try:
        degrees = resolve_degrees(config.parallelism, ranks)
        problems += check_batch_size(config.training, 0 if config.elastic.enable else degrees.batch)
        problems += check_update_degrees(config, degrees)
    except ConfigError as error:
        problems.append(error)
    problems += checks.check_end_of_schedule(config, degrees)
    if sizes and degrees:
        problems += checks.check_sequence_lengths(config, sizes, degrees)
        problems += check_sharded_options(config, spec, sizes, degrees)
    if sizes and plan:
        problems += check_lora(config, spec, sizes, plan.stages)
    if problems or not (sizes and degrees and plan):
        return None, problems
    global_batch = config.training.sequences_per_step(degrees.batch)
    return Job(config, spec, sizes, degrees, plan, global_batch), []
