"""How a model runs is decided here, in one order, on one screen; never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.kernels.backend import set_attention_kernel
from titanlite.models import LossConfig, ModelSizes, ModelSpec, OutputLayer
from titanlite.parallelize.activation_checkpoint import (
    ActivationCheckpointConfig,
    checkpoint_blocks,
    checkpoint_operations,
    set_memory_budget,
)
from titanlite.parallelize.activation_offload import offload_activations
from titanlite.parallelize.compile import (
    CompileConfig,
    compile_blocks,
    compile_loss,
    enable_async_tensor_parallel_fusion,
)
from titanlite.parallelize.context import apply_context_parallel
from titanlite.parallelize.float8 import (
    Float8Config,
    build_float8_scale_update,
    convert_to_float8,
    select_linear_styles,
)
from titanlite.parallelize.fsdp import FSDPPolicy, ReshardAfterForward, apply_fsdp
from titanlite.parallelize.pipeline import PipelinePlan, build_stage_modules
from titanlite.parallelize.tensor import apply_tensor_parallel
from titanlite.parallelize.weight_init import init_weights, tie_parameters

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class ModelTransforms:
    """What is done to a model beside spreading it."""

    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=lambda: ActivationCheckpointConfig(mode="none")
    )
    loss: LossConfig = field(default_factory=LossConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    param_dtype: torch.dtype = torch.float32  # of weights, gradients and moments between steps
    compute_dtype: torch.dtype = torch.float32  # what weights are cast to for computing
    reduce_dtype: torch.dtype = torch.float32  # what gradients are summed in
    cpu_offload: bool = False  # weights, gradients and moments stay in host memory
    attention_kernel: str | None = None  # of attention; None: torch's choice
    document_mask: bool = False  # each attends to itself alone


@dataclass(frozen=True)
class ParallelLayout:
    """How one run is parallelized: the device mesh, its settings and the pipeline stages."""

    mesh: Mesh
    config: ParallelismConfig
    plan: PipelinePlan


@dataclass(frozen=True)
class ShardedModel:
    """What this rank holds of a model."""

    model: nn.Module  # all of it, under the names of the whole model: what is trained and saved
    stage_modules: dict[int, nn.Module]  # its pipeline stages, made of the same modules
    output: (
        OutputLayer | None
    )  # the last of these modules, where the loss is; other stages have none
    dim: int  # of the activations between blocks
    compute_dtype: torch.dtype  # and their type
    update_float8_scales: Callable[[], None] = lambda: (
        None
    )  # to be called when weights may have changed


def parallelize(
    part: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    section: ParallelismConfig,
    transforms: ModelTransforms,
) -> None:
    """Spread a plain model on meta, or a stage of one, over its mesh, in place."""
    blocks, sizes = part.get_submodule(spec.blocks_path), part.sizes
    if (output := getattr(part, spec.output_path)) is not None:
        output.loss = transforms.loss
    convert_to_float8(
        part, transforms.float8
    )  # before the split, which has styles of their own for them
    shared_loss, column = not section.disable_loss_parallel, select_linear_styles(transforms.float8)
    apply_tensor_parallel(part, spec.tp_plan, mesh.tp, sizes.head_width, shared_loss, column)
    tie_parameters(part, spec.tied_parameters(sizes))  # the split makes a parameter of each
    set_attention_kernel(
        part, spec.attention_pattern, transforms.attention_kernel, transforms.document_mask
    )
    # after the kernel is set, because context parallel uses its own
    apply_context_parallel(part, spec.attention_pattern, mesh.cp, section)
    # Inside of the compiled code, because the compiler must see what is kept. After the split, here
    # and below, so that its gathers are computed again too; names stay as they were.
    checkpoint_operations(blocks, transforms.activation_checkpoint)
    if section.enable_async_tensor_parallel:
        enable_async_tensor_parallel_fusion(mesh.tp)  # by the compiler, which must know of it
    set_memory_budget(transforms.activation_checkpoint)
    compile_blocks(blocks, transforms.compile)
    compile_loss(output, transforms.compile)
    checkpoint_blocks(
        blocks, transforms.activation_checkpoint
    )  # around it: a whole block is run again as it is
    if (
        transforms.activation_checkpoint.offload
    ):  # around that, to see what it saves: the inputs of blocks
        offload_activations(blocks, mesh.fsdp.device_type)
    # last: shards whatever the others left whole, and casts whatever they compute with
    before, after = _ends(part, spec)
    apply_fsdp(
        part,
        before,
        blocks.values(),
        after,
        mesh.fsdp,
        FSDPPolicy(
            transforms.compute_dtype,
            transforms.reduce_dtype,
            _reshard(section),
            transforms.cpu_offload,
        ),
    )


def _reshard(section: ParallelismConfig) -> ReshardAfterForward:
    """A stage runs many micro-batches in a row: to gather its weights for each would not pay."""
    wish, pipelined = section.fsdp_reshard_after_forward, section.pipeline_parallel_degree > 1
    return "never" if wish == "default" and pipelined else wish


def _ends(part: nn.Module, spec: ModelSpec) -> tuple[list[nn.Module], list[nn.Module]]:
    """What is before the blocks and what is after them; ends that are tied are nobody's."""
    if spec.tied_parameters(part.sizes):
        return [], []
    names = list(dict(part.named_children()))
    blocks = names.index(spec.blocks_path)
    before, after = names[:blocks], names[blocks + 1 :]
    return [part.get_submodule(name) for name in before], [
        part.get_submodule(name) for name in after
    ]


def build_sharded_model(
    spec: ModelSpec,
    sizes: ModelSizes,
    layout: ParallelLayout,
    transforms: ModelTransforms,
    device: torch.device,
    *,
    seed: int,
) -> ShardedModel:
    """A model on its mesh with its starting weights; no rank ever holds more than its shards."""
    model, parts = build_stage_modules(spec, sizes, layout.plan, layout.mesh.pp.get_local_rank())
    for part in parts.values():
        part.to(transforms.param_dtype)
        parallelize(part, spec, layout.mesh, layout.config, transforms)
    model.to_empty(
        device="cpu" if transforms.cpu_offload else device
    )  # memory for the shards, nothing more
    # `to_empty` unties parameters, and FSDP does not always tie them again itself.
    tie_parameters(model, spec.tied_parameters(sizes))
    init_weights(model, spec.init_roles, sizes.n_layers, seed)
    rescale = build_float8_scale_update(model, transforms.float8, layout.mesh.tp)
    output = getattr(model, spec.output_path)
    return ShardedModel(model, parts, output, sizes.dim, transforms.compute_dtype, rescale)
