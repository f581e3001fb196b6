"""The job of a planned layout: its settings, its checks by train.py's own functions, its TOML."""

from __future__ import annotations

import dataclasses
from typing import Any

from titanlite.distributed.mesh import DIMENSIONS
from titanlite.job import Job, JobConfig
from titanlite.job.read import check_job
from titanlite.models import FAMILIES
from titanlite.parallelize.float8 import SECTION as FLOAT8_SECTION
from titanlite.parallelize.schedule import SCHEDULES
from titanlite_planner.plan.layout_space import RECOMPUTES, LayoutChoice, balanced_stages
from titanlite_planner.workload import POINTWISE_BUDGET

PER_STAGE = "pipeline_parallel_layers_per_stage"
SEARCHED = {  # settings that the search chooses, and the names by which they can be fixed
    **{f"parallelism.{dimension.key}": dimension.name for dimension in DIMENSIONS},
    "parallelism.expert_parallel_degree": "expert",
    "parallelism.expert_tensor_parallel_degree": "expert_tensor",
    "parallelism.pipeline_parallel_schedule": "schedule",
    "parallelism.pipeline_parallel_schedule_csv": "schedule",
    "parallelism.pipeline_parallel_microbatch_size": "micro_batch",
    "parallelism.module_fqns_per_model_part": "stages_per_rank",
    f"parallelism.{PER_STAGE}": "stages_per_rank",
    "parallelism.pipeline_parallel_first_stage_less_layers": "stages_per_rank",
    "parallelism.pipeline_parallel_last_stage_less_layers": "stages_per_rank",
    "parallelism.fsdp_reshard_after_forward": "reshard",
    "training.local_batch_size": "micro_batch",
    "activation_checkpoint.mode": "recompute",
    "activation_checkpoint.selective_ac_option": "recompute",
    "activation_checkpoint.memory_budget": "recompute",
    "activation_checkpoint.offload": "offload_activations",
    "optimizer.offload": "offload_optimizer",
}


def planned_config(base: JobConfig, choice: LayoutChoice) -> JobConfig:
    """`base` with the settings that the candidate chooses: SEARCHED, the batch sizes and Float8."""
    frame, degrees = choice.frame, choice.frame.degrees
    pipelined = degrees.pipeline > 1
    rank_batch = frame.micro_batch * frame.n_microbatches
    training = dataclasses.replace(
        base.training,
        local_batch_size=rank_batch if pipelined else frame.micro_batch,
        global_batch_size=rank_batch * degrees.batch,
    )
    validation = dataclasses.replace(
        base.validation, local_batch_size=frame.micro_batch * degrees.pipeline
    )
    optimizer = base.optimizer.replace(offload=choice.options.offload_optimizer)
    quantized = frame.precision != "bf16"
    return dataclasses.replace(
        base,
        training=training,
        validation=validation,
        optimizer=optimizer,
        parallelism=dataclasses.replace(base.parallelism, **_parallelism_keys(base, choice)),
        elastic=dataclasses.replace(base.elastic, enable=False),  # the candidate has its own ranks
        activation_checkpoint=dataclasses.replace(
            base.activation_checkpoint, **_recompute_keys(choice)
        ),
        quantize=_with_float8(base, choice) if quantized else _without_recipe(base),
        model=base.model if quantized else _without_float8(base),
    )


def _parallelism_keys(base: JobConfig, choice: LayoutChoice) -> dict[str, Any]:
    frame, degrees = choice.frame, choice.frame.degrees
    pipelined = degrees.pipeline > 1
    keys: dict[str, Any] = {d.key: getattr(degrees, d.name) for d in DIMENSIONS}
    keys |= {
        "expert_parallel_degree": degrees.expert,
        "expert_tensor_parallel_degree": degrees.expert_tensor,
        "pipeline_parallel_schedule": choice.schedule,
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": frame.micro_batch if pipelined else 1,
        "pipeline_parallel_first_stage_less_layers": None,
        "pipeline_parallel_last_stage_less_layers": None,
        PER_STAGE: None,
        "module_fqns_per_model_part": None,
        "enable_async_tensor_parallel": (
            base.parallelism.enable_async_tensor_parallel and degrees.tensor > 1
        ),
        # Under "default", parameters are freed after forward, but not in a pipeline.
        "fsdp_reshard_after_forward": (
            ("always" if pipelined else "default")
            if choice.options.reshard
            else ("default" if pipelined else "never")
        ),
    }
    if degrees.shard * degrees.context == 1:  # nothing is gathered
        keys["fsdp_reshard_after_forward"] = "default"
    if pipelined and choice.stages_per_rank != (SCHEDULES[choice.schedule].stages_per_rank or 2):
        keys["module_fqns_per_model_part"] = _balanced_stages(base, choice)
    return keys


def _balanced_stages(base: JobConfig, choice: LayoutChoice) -> list[list[str]]:
    """Stages of balanced cost; train.py makes them itself for a schedule's usual stages a rank."""
    spec = FAMILIES[base.model.name]
    costs = spec.module_flops(spec.sizes_of(base.model), base.training.seq_len)
    stages = choice.stages_per_rank * choice.frame.degrees.pipeline
    return balanced_stages(tuple(costs.items()), stages)


def _recompute_keys(choice: LayoutChoice) -> dict[str, Any]:
    kind, every = RECOMPUTES[choice.options.recompute]
    keys: dict[str, Any] = {"mode": kind, "offload": choice.options.offload_activations}
    if kind == "per_operation":
        keys |= {"mode": "selective", "selective_ac_option": "op"}
    elif kind == "memory_budget":
        keys["memory_budget"] = POINTWISE_BUDGET
    elif kind == "selective":
        keys["selective_ac_option"] = str(every)
    return keys


def _with_float8(base: JobConfig, choice: LayoutChoice):
    gathers = choice.frame.precision == "float8 gather"
    float8 = dataclasses.replace(
        base.quantize.linear.float8,
        recipe_name=base.float8.recipe_name or "tensorwise",
        enable_fsdp_float8_all_gather=gathers,
        precompute_float8_dynamic_scale_for_fsdp=gathers,
    )
    linear = dataclasses.replace(base.quantize.linear, float8=float8)
    return dataclasses.replace(base.quantize, linear=linear)


def _without_recipe(base: JobConfig):
    return dataclasses.replace(base.quantize, linear=JobConfig().quantize.linear)


def _without_float8(base: JobConfig):
    converters = [name for name in base.model.converters if name != FLOAT8_SECTION]
    return dataclasses.replace(base.model, converters=converters)


def planned_job(config: JobConfig, choice: LayoutChoice) -> Job:
    """The job of a planned configuration; raises the first problem that train.py would report."""
    job, problems = check_job(config, choice.frame.degrees.ranks)
    if job is None:
        raise problems[0]
    return job
