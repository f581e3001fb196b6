"""Read a job from a command line, and check it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from titanlite.distributed.mesh import resolve_degrees
from titanlite.job.checks import check_config, plan_job_pipeline, resolve_global_batch
from titanlite.job.config import MOVED, JobConfig, complete_table
from titanlite.job.environment import check_environment, device_type
from titanlite.job.job import Job
from titanlite.metrics import cpu_has_bf16_units
from titanlite.models import FAMILIES
from titanlite.settings import load_config, raise_together


def resolve_compute_dtype(config: JobConfig, elsewhere: bool) -> JobConfig:
    """Replace "auto" in training.mixed_precision_param by the dtype for the device of the job.

    `elsewhere`: the job is for another machine, which has GPUs.
    """
    if config.training.mixed_precision_param != "auto":
        return config
    on_cpu = not elsewhere and device_type(config) == "cpu"
    dtype: Any = "float32" if on_cpu and not cpu_has_bf16_units() else "bfloat16"
    training = dataclasses.replace(config.training, mixed_precision_param=dtype)
    return dataclasses.replace(config, training=training)


def read_job(argv: Sequence[str], world_size: int, *, here: bool = True) -> Job:
    """Read the job of a command line and check it for `world_size` ranks; raises all problems.

    Unless it is to run `here`, the data and the device need not exist; it cannot be run then.
    """
    config, refused = load_config(JobConfig, argv, MOVED, complete_table)
    elsewhere = bool(config.job.check_ranks) or not here
    config = resolve_compute_dtype(config, elsewhere)
    refused_keys = {key for problem in refused for key in problem.keys}
    world_size = config.job.check_ranks or world_size
    problems = list(check_config(config, world_size))
    if here:
        problems += check_environment(config)
    # A refused key has its default value now, so further problems of that key mean nothing.
    raise_together([*refused, *(p for p in problems if not refused_keys.intersection(p.keys))])
    spec = FAMILIES[config.model.name]
    sizes, degrees = spec.sizes_of(config.model), resolve_degrees(config.parallelism, world_size)
    plan, _ = plan_job_pipeline(config, spec, sizes)
    assert plan is not None, "checked: the pipeline has no problems"
    return Job(config, spec, sizes, degrees, plan, resolve_global_batch(config, degrees))
