"""Parallelize a plain single-device model; `parallelize` fixes the order of all transformations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.delta_rule import DeltaRule
from titanlite.kernels.fla import apply_fla_kernels
from titanlite.models import LoadBalancing, LossConfig, ModelSizes, ModelSpec, OutputLayer
from titanlite.models.mup import WidthScale
from titanlite.models.router import NO_BALANCING, find_routers
from titanlite.models.sizes import prediction_layers
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
    replace_forward,
)
from titanlite.parallelize.context import apply_context_parallel
from titanlite.parallelize.expert import apply_expert_parallel, experts_on_own_mesh
from titanlite.parallelize.float8 import (
    Float8Config,
    build_float8_scale_update,
    convert_to_float8,
    select_linear_styles,
)
from titanlite.parallelize.fsdp import FSDPPolicy, apply_fsdp
from titanlite.parallelize.lora import LoraConfig, add_adapters
from titanlite.parallelize.pipeline import build_stage_modules
from titanlite.parallelize.pipeline_plan import PipelinePlan
from titanlite.parallelize.tensor import apply_tensor_parallel
from titanlite.parallelize.tied import (
    RankModel,
    TiedCopy,
    build_tied_copies,
    pairs_inside,
    tie_parameters,
)
from titanlite.parallelize.weight_init import init_weights

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class ModelTransforms:
    """Model transformations other than parallelism."""

    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=lambda: ActivationCheckpointConfig(mode="none")
    )
    loss: LossConfig = field(default_factory=LossConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    lora: LoraConfig = field(default_factory=LoraConfig)
    param_dtype: torch.dtype = torch.float32  # weights, gradients; state: see optimizer.state_dtype
    compute_dtype: torch.dtype = torch.float32  # weights and activations in forward and backward
    cpu_offload: bool = False  # store weights, gradients and optimizer state in host memory
    attention_kernel: str | None = None  # None: torch selects one
    linear_backend: str = "torch"  # of linear attention; see `AttentionConfig`
    load_balancing: LoadBalancing = NO_BALANCING  # of the experts
    document_mask: bool = False  # attention does not cross document boundaries
    like_torchtitan: bool = False  # the distributions of the initial weights; see `init_weights`

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights can be computed at different times.

        Not with activation checkpointing: torch would recompute a block once for each of its
        weights. Not with compiled blocks: torch would run their backward twice.
        """
        return self.activation_checkpoint.mode == "none" and not self.compile.compiles("model")


@dataclass(frozen=True)
class ParallelLayout:
    """How one run is parallelized: the device mesh, its settings and the pipeline stages."""

    mesh: Mesh
    config: ParallelismConfig
    plan: PipelinePlan


@dataclass(frozen=True)
class ShardedModel:
    """This rank's shard of the model."""

    model: nn.Module  # all modules of this rank, under their names in the full model
    stage_modules: dict[int, nn.Module]  # pipeline stage -> the same modules, one model per stage
    output: OutputLayer | None  # output layer and loss; None if another pipeline rank has it
    dim: int  # width of the residual stream
    compute_dtype: torch.dtype
    update_float8_scales: Callable[[], None] = lambda: None
    # called before each step and each validation batch, because the weights may have changed
    tied_copies: tuple[TiedCopy, ...] = ()  # of parameters that two pipeline stages share
    splits_backward: bool = True  # see ModelTransforms; false with multi-token prediction
    prediction_layers: int = 0  # depths of multi-token prediction, on whatever rank


def parallelize(
    model: nn.Module,
    spec: ModelSpec,
    sizes: ModelSizes,
    mesh: Mesh,
    config: ParallelismConfig,
    transforms: ModelTransforms,
) -> None:
    """Parallelize a plain model on the meta device, or one pipeline stage of it, in place."""
    blocks = model.get_submodule(spec.blocks_path)
    assert isinstance(blocks, nn.ModuleDict)
    activation_checkpoint = transforms.activation_checkpoint
    output = getattr(model, spec.output_path)
    if output is not None:
        output.config = transforms.loss
    for router in find_routers(model):
        router.set_balancing(transforms.load_balancing)
    adapted = transforms.lora.select(model)  # before TP, which replaces classes
    # before TP, which has styles for Float8 linears
    convert_to_float8(model, transforms.float8, transforms.compile)
    linear_styles_of = select_linear_styles(transforms.float8)
    loss_parallel = not config.disable_loss_parallel
    apply_tensor_parallel(
        model, spec.tp_plan, mesh.tp, sizes.head_width, loss_parallel, linear_styles_of
    )
    apply_expert_parallel(model, mesh)  # with TP: both replace parameters by shards
    tied = pairs_inside(model, spec.tied_parameters(sizes))
    tie_parameters(model, tied)  # TP replaced both parameters of a tied pair
    if transforms.lora.rank:  # after TP, whose shards of a weight decide those of its adapter
        add_adapters(model, adapted, transforms.lora, transforms.param_dtype)
    pattern = spec.attention_pattern
    set_attention_kernel(model, pattern, transforms.attention_kernel, transforms.document_mask)
    if transforms.linear_backend == "fla":
        for module in model.modules():
            if isinstance(module, DeltaRule):
                replace_forward(module, apply_fla_kernels)
    apply_context_parallel(model, pattern, mesh.cp, config)  # after the kernel: replaces it
    # Checkpointing comes after TP, so that the TP all-gathers are recomputed too. Per-operation
    # checkpointing comes before compile, which must see which outputs are saved.
    checkpoint_operations(blocks, activation_checkpoint)
    if config.enable_async_tensor_parallel and mesh.tp.size() > 1:
        enable_async_tensor_parallel_fusion(mesh.tp)  # a compiler setting: before compile
    set_memory_budget(activation_checkpoint)  # likewise
    compile_blocks(blocks, transforms.compile, transforms.float8.rounds_as_eager)
    compile_loss(output, transforms.compile)
    checkpoint_blocks(blocks, activation_checkpoint)  # after compile: recomputes a compiled block
    if activation_checkpoint.offload:  # after checkpointing, to offload the block inputs it saves
        folder = activation_checkpoint.offload_folder
        offload_activations(blocks, mesh.fsdp.device_type, folder)
    # A tied weight must be in one FSDP group only, here that of the whole model.
    before, after = ([], []) if tied else _modules_around_blocks(model, spec.blocks_path)
    reshard = config.fsdp_reshard_after_forward
    if reshard == "default" and config.pipeline_parallel_degree > 1:
        reshard = "never"  # one all-gather for each of the micro-batches in a row would be too slow
    policy = FSDPPolicy(transforms.compute_dtype, reshard, transforms.cpu_offload)
    experts = experts_on_own_mesh(blocks, mesh.experts)
    # last: shards and casts what is still replicated
    apply_fsdp(model, before, blocks.values(), after, mesh, policy, experts)


def _modules_around_blocks(model: nn.Module, path: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """(modules before the blocks, modules after them)."""
    names, modules = zip(*model.named_children(), strict=True)
    position = names.index(path)
    return [*modules[:position]], [*modules[position + 1 :]]


@dataclass(frozen=True)
class ParallelModules:
    """This rank's modules, parallelized, on the meta device."""

    spec: ModelSpec
    sizes: ModelSizes
    layout: ParallelLayout
    transforms: ModelTransforms
    model: nn.Module  # all modules of this rank
    stage_modules: dict[int, nn.Module]  # pipeline stage -> the same modules

    def materialize(
        self, device: torch.device, seed: int, widths: Mapping[str, WidthScale] | None = None
    ) -> ShardedModel:
        """Allocate this rank's shards only, and initialize the weights as `init_weights`."""
        model, transforms, sizes = self.model, self.transforms, self.sizes
        stages, mesh = self.stage_modules, self.layout.mesh
        model.to_empty(device="cpu" if transforms.cpu_offload else device)
        for router in find_routers(model):
            router.move_buffers(device)
        # Like TP, to_empty() replaces both parameters of a tied pair; FSDP does not always tie them
        tied = self.spec.tied_parameters(sizes)
        copies = self.spec.stage_copies(sizes) if len(self.layout.plan.stages) > 1 else []
        for stage in stages.values():
            tie_parameters(stage, pairs_inside(stage, tied))
        if isinstance(model, RankModel):
            model.add_second_names()
        init_weights(model, self.spec, sizes, seed, widths, transforms.like_torchtitan)
        outputs = (getattr(stage, self.spec.output_path) for stage in stages.values())
        return ShardedModel(
            model,
            stages,
            output=next((output for output in outputs if output is not None), None),
            dim=sizes.dim,
            compute_dtype=transforms.compute_dtype,
            update_float8_scales=build_float8_scale_update(model, transforms.float8, mesh.tp),
            tied_copies=build_tied_copies(stages, self.layout.plan, [*tied, *copies], mesh.pp),
            splits_backward=transforms.splits_backward and not prediction_layers(sizes),
            prediction_layers=prediction_layers(sizes),
        )


def build_parallel_modules(
    spec: ModelSpec, sizes: ModelSizes, layout: ParallelLayout, transforms: ModelTransforms
) -> ParallelModules:
    """Build this rank's modules on the meta device, and parallelize them."""
    pp_rank = layout.mesh.pp.get_local_rank()
    model, stage_modules = build_stage_modules(spec, sizes, layout.plan, pp_rank)
    for stage_module in stage_modules.values():
        frozen = torch.bfloat16 if transforms.lora.base_dtype else transforms.param_dtype
        stage_module.to(frozen)
        parallelize(stage_module, spec, sizes, layout.mesh, layout.config, transforms)
    return ParallelModules(spec, sizes, layout, transforms, model, stage_modules)
