"""How a model runs is decided here, in one order, on one screen; never what it computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.models import Family
from titanlite.parallelize.activation import ActivationCheckpointConfig, recompute_activations
from titanlite.parallelize.init import start_weights, tie
from titanlite.parallelize.shard import shard_parameters
from titanlite.parallelize.tensor import split_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parallelize(
    model: nn.Module,
    family: Family,
    mesh: Mesh,
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    *,
    compute: torch.dtype = torch.float32,
    reduce: torch.dtype = torch.float32,
    offload: bool = False,
) -> None:
    """Spread a plain model on meta over the mesh, in place; `start_weights` then fills it."""
    blocks = model.get_submodule(family.block_path)
    sharded_loss = not section.disable_loss_parallel
    split_tensors(model, family.split, mesh.tp, model.shape.head_width, sharded_loss)
    tie(model, family.tied(model.shape))  # the split makes a parameter of each
    # after the split, so that its gathers are computed again too; the names stay as they were
    recompute_activations(blocks, recompute)
    # last: shards whatever the others left whole, and casts whatever they compute with
    shard_parameters(
        model,
        blocks,
        _ends(model, family),
        mesh.fsdp,
        compute=compute,
        reduce=reduce,
        reshard=section.fsdp_reshard_after_forward,
        offload=offload,
    )


def _ends(model: nn.Module, family: Family) -> list[list[nn.Module]]:
    """What is before the blocks and what is after them, gathered together; tied ends stay one."""
    first, *after = [m for name, m in model.named_children() if name != family.block_path]
    return [] if family.tied(model.shape) else [[first], after]


def loss_context(mesh: Mesh, section: ParallelismConfig) -> Callable[[], AbstractContextManager]:
    """What loss and backward must run inside of: sharded logits need DTensor's own loss."""
    sharded = mesh.tp.size() > 1 and not section.disable_loss_parallel
    return loss_parallel if sharded else nullcontext


def build_spread_model(
    family: Family,
    shape,
    mesh: Mesh,
    section: ParallelismConfig,
    recompute: ActivationCheckpointConfig,
    device: torch.device,
    *,
    seed: int,
    compute: torch.dtype = torch.float32,
    reduce: torch.dtype = torch.float32,
    offload: bool = False,
) -> nn.Module:
    """A model on its mesh with its starting weights; no rank ever holds more than its shards."""
    with torch.device("meta"):
        model = family.build(shape)
    parallelize(
        model, family, mesh, section, recompute, compute=compute, reduce=reduce, offload=offload
    )
    model.to_empty(device="cpu" if offload else device)  # memory for the shards, nothing more
    tie(model, family.tied(shape))  # as does this, where FSDP does not mend it by itself
    start_weights(model, family.start, shape.n_layers, seed)
    return model
