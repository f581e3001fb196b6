"""The workload of a job: one step of it, as plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from torch import nn

from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.optim import MatrixFacts
from titanlite.parallelize.fsdp import REDUCE_DTYPE
from titanlite_planner.memory.optimizer_state import optimizer_state_bytes
from titanlite_planner.model_shape import shape_of
from titanlite_planner.workload import (
    Layout,
    MatmulPrecision,
    Numerics,
    Overlap,
    Recompute,
    Workload,
)

QUANTIZE_BYTES = {"rowwise": 5.3, "rowwise_with_gw_hp": 3.1}
# of an element of an operand: what compiled blocks of 8B move more than in bf16, on Hopper; see
# benchmarks/gpu_bytes.md
OWN_KERNELS = ("cudnn", "fa3", "fa4")  # written for the GPU's generation; others are PyTorch's


def workload_of(job: Job) -> Workload:
    """One step of a job, after training.batch_size_ramp. Raises ConfigError."""
    config = job.config
    if config.lora.rank:
        raise ConfigError(
            f"planner: lora.rank = {config.lora.rank}: the formulas are for models that train all"
            " weights.",
            fix="Use python -m titanlite_planner dry-run, which runs the adapters.",
        )
    for section in ("optimizer", "activation_checkpoint"):
        options = getattr(config, section)
        if options.offload and options.offload_folder:
            raise ConfigError(
                f"planner: {section}.offload_folder = {options.offload_folder}: the time of a step"
                " cannot be estimated, because the bandwidth of the disk is not known.",
                fix="Remove it, to plan for host memory; the GPU has about as much in its memory.",
            )
    return Workload(
        model=dataclasses.replace(
            shape_of(job.spec, job.sizes), name=f"{job.spec.name}/{config.model.flavor}"
        ),
        layout=_layout_of(job),
        seq_len=config.training.seq_len,
        numerics=_numerics_of(job),
        **recomputation_of(job),
        loss_chunk_tokens=config.loss.chunk_tokens,
        compiled=config.compile.compiles("model"),
        counted_kernels=True,
        fused_attention=True,
        overlap=Overlap(tensor=config.parallelism.enable_async_tensor_parallel),
        attention_kernel=_attention_kernel_of(job),
        offload_activations=config.activation_checkpoint.offload,
        offload_optimizer=config.optimizer.offload or config.training.enable_cpu_offload,
        step_in_backward=config.optimizer.early_step_in_backward,
        offload_parameters=config.training.enable_cpu_offload,
    )


def _attention_kernel_of(job: Job) -> Literal["native", "flash2"]:
    """The kernel that is named, or that is expected to be the fastest: see `choose_kernel`."""
    config = job.config
    if config.attention.backend != "auto":
        return "native" if config.attention.backend in OWN_KERNELS else "flash2"
    # cuDNN has no document masks, no sinks here, no fp32 and no deterministic backward.
    is_half = job.transforms.compute_dtype.itemsize == 2
    supported = is_half and config.attention.mask == "causal" and not config.debug.deterministic
    supported = supported and not job.spec.attention_sinks
    return "native" if supported else "flash2"


def _layout_of(job: Job) -> Layout:
    degrees, plan, parallelism = job.degrees, job.pipeline, job.config.parallelism
    reshard, pipelined = parallelism.fsdp_reshard_after_forward, degrees.pipeline > 1
    prefix = f"{job.spec.blocks_path}."
    keeps = degrees.replicate * degrees.shard * degrees.context * degrees.expert_shard == 1
    return Layout(
        replicate=degrees.replicate,
        shard=degrees.shard,
        context=degrees.context,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        expert=degrees.expert,
        expert_tensor=degrees.expert_tensor if degrees.expert > 1 else 0,
        sharded="parameters",
        reshard_after_forward=reshard == "always"
        or (reshard == "default" and not (pipelined or keeps)),
        reshard_last_group=reshard == "always",
        schedule=plan.schedule if plan.csv is None else "csv",
        stages_per_rank=len(plan.stages) // plan.ranks,
        micro_batch=plan.microbatch_size,
        n_microbatches=job.rank_batch // plan.microbatch_size,
        runs=job.rank_batch // job.config.training.local_batch_size if pipelined else 1,
        reduce_every_microbatch=parallelism.fsdp_gradient_reduction == "every_microbatch",
        stage_blocks=tuple(sum(n.startswith(prefix) for n in names) for names in plan.stages),
        stage_ranks=tuple(plan.rank_of),
        actions=() if plan.csv is None else tuple(map(tuple, plan.order())),
    )


def _numerics_of(job: Job) -> Numerics:
    transforms, float8 = job.transforms, job.config.float8
    parameters = transforms.param_dtype.itemsize
    matmuls: MatmulPrecision = "float32"
    if float8.experts is not None:
        raise ConfigError(
            "planner: quantize.grouped_mm.float8 cannot be estimated; no run of titanlite or"
            " torchtitan with it has been measured.",
            fix='Plan without "quantize.grouped_mm.float8" in model.converters.',
        )
    if float8.recipe_name == "mxfp8":
        raise ConfigError(
            'planner: quantize.linear.float8.recipe_name = "mxfp8" cannot be estimated; no run of'
            " titanlite or torchtitan with it has been measured.",
            fix='Plan with "tensorwise", or without Float8.',
        )
    if float8.recipe_name:
        matmuls = "float8"
    elif transforms.compute_dtype.itemsize == 2:
        matmuls = "bfloat16"
    average = job.config.weight_average
    return Numerics(
        matmuls=matmuls,
        parameter_bytes=parameters,
        gathered_bytes=transforms.compute_dtype.itemsize,
        gradient_bytes=parameters,
        state_bytes=_state_bytes_per_element(job),
        average_bytes=4 if average.decay and not average.offload else 0,
        activation_bytes=transforms.compute_dtype.itemsize,
        float8_gather=matmuls == "float8" and float8.enable_fsdp_float8_all_gather,
        quantize_bytes=QUANTIZE_BYTES.get(float8.recipe_name or "", 0.0),
        reduce_bytes=REDUCE_DTYPE.itemsize,
    )


def _state_bytes_per_element(job: Job) -> float:
    """Mean bytes of optimizer state per parameter element, on whatever device it is."""
    optimizer = job.config.optimizer.replace(offload=False)
    facts = MatrixFacts(job.spec, job.sizes, job.transforms.compute_dtype)
    dtype = job.transforms.param_dtype
    total = optimizer_state_bytes(all_parameter_shapes(job), optimizer, dtype, facts)
    return total / job.spec.count_parameters(job.sizes)


def first_blocks(job: Job) -> nn.Module:
    """The model on the meta device, with its first blocks up to one that has experts, if any has.

    All later blocks are like the last of these.
    """
    experts = shape_of(job.spec, job.sizes).experts
    blocks = min(job.sizes.n_layers, 1 + (experts.dense_layers if experts else 0))
    with torch.device("meta"):
        return job.spec.build(dataclasses.replace(job.sizes, n_layers=blocks))


def all_parameter_shapes(job: Job) -> list[tuple[str, torch.Size]]:
    """(name, shape) of every parameter of a job's model."""
    model, path = first_blocks(job), job.spec.blocks_path
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    last = len(list(model.get_submodule(path).children())) - 1
    prefix = f"{path}.{last}."
    more = [
        (f"{path}.{number}.{name.removeprefix(prefix)}", shape)
        for number in range(last + 1, job.sizes.n_layers)
        for name, shape in shapes
        if name.startswith(prefix)
    ]
    return [*shapes, *more]


def recomputation_of(job: Job) -> dict[str, Any]:
    """The fields of `Workload` that say what is recomputed."""
    config = job.config.activation_checkpoint
    mode: Recompute = "per_operation" if config.per_operation else config.mode
    fields: dict[str, Any] = {"recompute": mode}
    if mode == "selective":
        fields["recompute_every"] = int(config.selective_ac_option)
    if mode == "memory_budget":
        fields["stored_activations"] = float(config.memory_budget)
    return fields
