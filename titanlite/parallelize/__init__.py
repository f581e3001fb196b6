"""How a model runs is decided here, in one order, on one screen; never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.models import Family
from titanlite.parallelize.activation import ActivationCheckpointConfig, recompute_activations
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.context import attend_over_ranks
from titanlite.parallelize.float8 import (
    Float8Config,
    float8_column,
    scaling_at_once,
    swap_in_float8,
)
from titanlite.parallelize.init import start_weights, tie
from titanlite.parallelize.pipeline import PipelinePlan, parts_of
from titanlite.parallelize.shard import shard_parameters
from titanlite.parallelize.tensor import split_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Passes:
    """What is done to a model beside spreading it."""

    recompute: ActivationCheckpointConfig = field(
        default_factory=lambda: ActivationCheckpointConfig(mode="none")
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    compute: torch.dtype = torch.float32  # what weights are cast to for computing
    reduce: torch.dtype = torch.float32  # what gradients are summed in
    offload: bool = False  # weights, gradients and moments stay in host memory


@dataclass(frozen=True)
class SpreadModel:
    """What this rank holds of a model."""

    model: nn.Module  # all of it, under the names of the whole model: what is trained and saved
    parts: dict[int, nn.Module]  # its pipeline stages, made of the same modules
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
    sharded_loss = not section.disable_loss_parallel
    swap_in_float8(part, passes.float8)  # before the split, which has styles of their own for them
    column = float8_column(passes.float8)
    split_tensors(part, family.split, mesh.tp, shape.head_width, sharded_loss, column)
    tie(part, family.tied(shape))  # the split makes a parameter of each
    attend_over_ranks(part, family.attention, mesh.cp, section)
    # after the split, so that its gathers are computed again too; the names stay as they were
    recompute_activations(blocks, passes.recompute)
    # last: shards whatever the others left whole, and casts whatever they compute with
    shard_parameters(
        part,
        blocks,
        _ends(part, family),
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


def _ends(part: nn.Module, family: Family) -> list[list[nn.Module]]:
    """What is before the blocks and what is after them, gathered together; tied ends stay one."""
    if family.tied(part.shape):
        return []
    names = list(dict(part.named_children()))
    blocks = names.index(family.block_path)
    ends = [names[:blocks], names[blocks + 1 :]]
    return [[part.get_submodule(name) for name in end] for end in ends if end]


def loss_context(mesh: Mesh, section: ParallelismConfig) -> Callable[[], AbstractContextManager]:
    """What loss and backward must run inside of: sharded logits need DTensor's own loss."""
    sharded = mesh.tp.size() > 1 and not section.disable_loss_parallel
    return loss_parallel if sharded else nullcontext


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
        parallelize(part, family, mesh, section, passes)
        for name, end in part.named_children():  # Float8 puts a new output layer into the part
            if name != family.block_path:
                setattr(model, name, end)
    model.to_empty(device="cpu" if passes.offload else device)  # memory for the shards, nothing more
    tie(model, family.tied(shape))  # as does this, where FSDP does not mend it by itself
    start_weights(model, family.start, shape.n_layers, seed)
    rescale = scaling_at_once(model, passes.float8, mesh.tp)
    return SpreadModel(model, parts, shape.dim, passes.compute, rescale)
