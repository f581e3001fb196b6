"""How a model runs is decided here, in one order, on one screen; never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.models import Family, LossConfig, Output
from titanlite.parallelize.activation import (
    ActivationCheckpointConfig,
    keep_to_budget,
    recompute_blocks,
    recompute_operations,
)
from titanlite.parallelize.attention import attend_by
from titanlite.parallelize.compile import (
    CompileConfig,
    compile_blocks,
    compile_loss,
    overlap_tensor_parallel,
)
from titanlite.parallelize.context import attend_over_ranks
from titanlite.parallelize.float8 import (
    Float8Config,
    float8_column,
    scaling_at_once,
    swap_in_float8,
)
from titanlite.parallelize.init import start_weights, tie
from titanlite.parallelize.offload import offload_activations
from titanlite.parallelize.pipeline import PipelinePlan, parts_of
from titanlite.parallelize.shard import shard_parameters
from titanlite.parallelize.tensor import split_tensors

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Passes:
    """What is done to a model beside spreading it."""

    recompute: ActivationCheckpointConfig = field(
        default_factory=lambda: ActivationCheckpointConfig(mode="none")
    )
    loss: LossConfig = field(default_factory=LossConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    keep: torch.dtype = torch.float32  # of weights, gradients and moments between steps
    compute: torch.dtype = torch.float32  # what weights are cast to for computing
    reduce: torch.dtype = torch.float32  # what gradients are summed in
    offload: bool = False  # weights, gradients and moments stay in host memory
    kernel: str | None = None  # of attention; None: torch's choice
    documents: bool = False  # each attends to itself alone


@dataclass(frozen=True)
class SpreadModel:
    """What this rank holds of a model."""

    model: nn.Module  # all of it, under the names of the whole model: what is trained and saved
    parts: dict[int, nn.Module]  # its pipeline stages, made of the same modules
    output: Output | None  # the last of these modules, where the loss is; other stages have none
    width: int  # of the activations between blocks
    dtype: torch.dtype  # and their type
    rescale: Callable[[], None] = lambda: None  # to be called when weights may have changed


def parallelize(
    part: nn.Module,
    family: Family,
    mesh: Mesh,
    section: ParallelismConfig,
    passes: Passes,
) -> None:
    """Spread a plain model on meta, or a stage of one, over its mesh, in place."""
    blocks, shape = part.get_submodule(family.block_path), part.shape
    if (output := getattr(part, family.output)) is not None:
        output.loss = passes.loss
    swap_in_float8(part, passes.float8)  # before the split, which has styles of their own for them
    shared_loss, column = not section.disable_loss_parallel, float8_column(passes.float8)
    split_tensors(part, family.split, mesh.tp, shape.head_width, shared_loss, column)
    tie(part, family.tied(shape))  # the split makes a parameter of each
    attend_by(part, family.attention, passes.kernel, passes.documents)
    attend_over_ranks(part, family.attention, mesh.cp, section)  # it has kernels of its own
    # Inside of the compiled code, because the compiler must see what is kept. After the split, here
    # and below, so that its gathers are computed again too; names stay as they were.
    recompute_operations(blocks, passes.recompute)
    if section.enable_async_tensor_parallel:
        overlap_tensor_parallel(mesh.tp)  # by the compiler, which must know of it
    keep_to_budget(passes.recompute)
    compile_blocks(blocks, passes.compile)
    compile_loss(output, passes.compile)
    recompute_blocks(blocks, passes.recompute)  # around it: a whole block is run again as it is
    if passes.recompute.offload:  # around that, to see what it saves: the inputs of blocks
        offload_activations(blocks, mesh.fsdp.device_type)
    # last: shards whatever the others left whole, and casts whatever they compute with
    before, after = _ends(part, family)
    shard_parameters(
        part,
        before,
        blocks.values(),
        after,
        mesh.fsdp,
        compute=passes.compute,
        reduce=passes.reduce,
        reshard=_reshard(section),
        offload=passes.offload,
    )


def _reshard(section: ParallelismConfig) -> str:
    """A stage runs many micro-batches in a row: to gather its weights for each would not pay."""
    wish, pipelined = section.fsdp_reshard_after_forward, section.pipeline_parallel_degree > 1
    return "never" if wish == "default" and pipelined else wish


def _ends(part: nn.Module, family: Family) -> tuple[list[nn.Module], list[nn.Module]]:
    """What is before the blocks and what is after them; ends that are tied are nobody's."""
    if family.tied(part.shape):
        return [], []
    names = list(dict(part.named_children()))
    blocks = names.index(family.block_path)
    before, after = names[:blocks], names[blocks + 1 :]
    return [part.get_submodule(name) for name in before], [
        part.get_submodule(name) for name in after
    ]


def build_spread_model(
    family: Family,
    shape,
    mesh: Mesh,
    section: ParallelismConfig,
    plan: PipelinePlan,
    passes: Passes,
    device: torch.device,
    *,
    seed: int,
) -> SpreadModel:
    """A model on its mesh with its starting weights; no rank ever holds more than its shards."""
    model, parts = parts_of(family, shape, plan, mesh.pp.get_local_rank())
    for part in parts.values():
        part.to(passes.keep)
        parallelize(part, family, mesh, section, passes)
    model.to_empty(
        device="cpu" if passes.offload else device
    )  # memory for the shards, nothing more
    tie(model, family.tied(shape))  # as does this, where FSDP does not mend it by itself
    start_weights(model, family.start, shape.n_layers, seed)
    rescale = scaling_at_once(model, passes.float8, mesh.tp)
    output = getattr(model, family.output)
    return SpreadModel(model, parts, output, shape.dim, passes.compute, rescale)
