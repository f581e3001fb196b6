"""Faults that are planted in the trainer, each of which a case of the oracle must find.

A fault replaces one function while a layout runs. `everywhere`: also in the one process that the
layout is compared with, as a fault of a model is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.distributed.oracle import Layout, Recipe, Record, run_layout
from titanlite.distributed.mesh import Mesh
from titanlite.models import loss
from titanlite.models.llama import TransformerBlock
from titanlite.models.router import Router
from titanlite.optim import clip
from titanlite.parallelize import context, context_attention, context_delta, pipeline
from titanlite.parallelize.context_tiles import SequenceShard
from titanlite.parallelize.tensor_styles import ShardedVocabulary
from titanlite.parallelize.tied import TiedCopy
from titanlite.training import step
from titanlite.training.batch import Batch, TokenSelector
from titanlite.training.spmd_engine import SpmdEngine

Wrong = Callable[..., Any]  # (the function that it replaces, its arguments) -> a wrong result


@dataclass(frozen=True)
class PlantedFault:
    """A fault, the case of the oracle that claims to find it, and what it says."""

    target: Any  # module or class
    name: str  # of its function
    wrong: Wrong
    recipe: str  # the name of a recipe in test_oracle.py
    layout: str  # a layout that is tested with it
    found_in: str  # one of the measurements that differ, or a part of the error
    everywhere: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the fault in this process."""
        original, wrong = getattr(self.target, self.name), self.wrong

        def replacement(*args: Any, **options: Any) -> Any:
            return wrong(original, *args, **options)

        is_property = isinstance(original, property)
        new = property(wrong) if is_property else replacement
        with mock.patch.object(self.target, self.name, new):
            yield


def run_planted(cases: list[tuple[str, Layout, Recipe]]) -> list[Record | str]:
    """This rank's record of each layout with the fault of that name, or its error."""
    records: list[Record | str] = []
    for name, layout, recipe in cases:
        with FAULTS[name].planted():
            try:
                records.append(run_layout(layout, recipe))
            except Exception as error:
                records.append(f"{type(error).__name__}: {error}")
    return records


# --- the faults -----------------------------------------------------------------------------------


def _skip_if_fsdp_calls(original, tensor, *args, **options):
    caller = sys._getframe(2).f_globals["__name__"]  # above `replacement`
    return None if "fsdp" in caller else original(tensor, *args, **options)


def _skip_count(original, mesh, value):
    """Only the number of valid labels is an integer."""
    return original(mesh, value) if value.is_floating_point() else value


def _double_on_rank_1(original, *args, **options):
    return original(*args, **options) * (1 + (dist.get_rank() == 1))


def _forget_copy(original, copy) -> None:
    if copy.copy is not None:
        copy.copy.grad = None


def _divide_depth(original, factor, total, z_loss, grad):
    if factor is not None:
        factor *= 60 / grad.any(1).sum().clamp(min=1).item()  # rows of valid labels
    original(factor, total, z_loss, grad)


def _without_effect(original, block, x, *args):
    """The result does not depend on the weights, which get gradients of zero."""
    return x + 0 * original(block, x, *args)


def _ignore_router(original, router, scores, indices):
    return original(router, scores.detach() + 0 * scores, indices)


def _ignore_documents(original, tokens, *args):
    return original(replace(tokens, document_end_id=None), *args)


def _lengthen_window(original, attention, options, *args):
    group, balanced, rotate, window, cudnn = options
    return original(attention, (group, balanced, rotate, window + 1, cudnn), *args)


def _count_from_zero(original, shard, length, device=None):
    return torch.arange(length // shard.ranks, device=device)


def _reverse_blocks(original, model, names, path) -> None:
    original(model, names, path)
    blocks = model.get_submodule(path)
    for name, block in reversed(list(blocks.items())):
        del blocks[name]
        blocks[name] = block


FAULTS = {
    "replicas do not sum gradients": PlantedFault(
        dist,
        "all_reduce",
        _skip_if_fsdp_calls,
        "adaptive clipping",
        "replicate=2",
        "differs between ranks",
    ),
    "gradients are divided by the degree": PlantedFault(
        FSDPModule,
        "set_gradient_divide_factor",
        lambda original, module, factor: original(module, 2 * factor),
        "SGD",
        "shard=2,accumulate=3",
        "gradients of step 0",
    ),
    "the sum over the vocabulary is that of one rank": PlantedFault(
        ShardedVocabulary,
        "reduce_sum",
        lambda original, vocabulary, local: local,
        "SGD",
        "tensor=2,accumulate=3",
        "differ between ranks",
    ),
    "a rank divides by its own labels": PlantedFault(
        step, "all_reduce_sum", _skip_count, "SGD", "shard=2,accumulate=3", "loss"
    ),
    "the loss of a rank counts twice": PlantedFault(
        SpmdEngine, "forward_backward", _double_on_rank_1, "SGD", "shard=2,accumulate=3", "loss"
    ),
    "the norm counts replicated tensors twice": PlantedFault(
        clip, "count_copies", lambda original, *args: 1, "SGD", "tensor=2,accumulate=3", "norm"
    ),
    "clipping is dropped": PlantedFault(
        step,
        "clip_gradients",
        lambda original, *args: original(*args)._replace(factor=None),
        "clipped",
        "shard=2",
        "weights",
    ),
    "the update is a thousandth too large": PlantedFault(
        step,
        "clip_gradients",
        lambda original, *args: original(*args)._replace(factor=torch.tensor(1.001)),
        "SGD",
        "shard=2,accumulate=3",
        "weights",
    ),
    "all ranks read the same sequences": PlantedFault(
        Mesh, "batch_rank", lambda mesh: 0, "SGD", "shard=2,accumulate=3", "loss"
    ),
    "the last micro-batch is dropped": PlantedFault(
        Batch,
        "split",
        lambda original, *args: original(*args)[:-1],
        "SGD",
        "shard=2,accumulate=3",
        "loss",
    ),
    "the gradient of the copy of a tied tensor is dropped": PlantedFault(
        TiedCopy,
        "reduce_gradient",
        _forget_copy,
        "tied embeddings",
        "pipeline=2,microbatch=3",
        "gradients of step 0",
    ),
    "multi-token prediction is off by a token": PlantedFault(
        TokenSelector,
        "look_ahead",
        lambda original, tokens, batch: original(
            tokens, replace(batch, labels=batch.labels.roll(-1, 1))
        ),
        "ragged, further tokens",
        "shard=2,expert=2",
        "depths",
    ),
    "a depth is divided by the labels of its micro-batch": PlantedFault(
        loss,
        "scale_depth_",
        _divide_depth,
        "ragged, further tokens",
        "shard=2,expert=2",
        "gradients of step 0",
    ),
    "the gradient of the copied embedding is dropped": PlantedFault(
        TiedCopy,
        "reduce_gradient",
        _forget_copy,
        "further tokens",
        "pipeline=2,microbatch=3",
        "gradients of step 0",
    ),
    "the blocks of a stage run in reverse": PlantedFault(
        pipeline,
        "_remove_other_modules",
        _reverse_blocks,
        "SGD",
        "pipeline=2,microbatch=1,accumulate=3",
        "gradients of step 0",
    ),
    "RoPE's positions of each shard begin at 0": PlantedFault(
        SequenceShard,
        "positions",
        _count_from_zero,
        "SGD",
        "context=2,accumulate=3",
        "gradients of step 0",
    ),
    "the window has a token more under context parallel": PlantedFault(
        context,
        "_attend_over_ranks",
        _lengthen_window,
        "mistral",
        "context=2,rotate=alltoall",
        "gradients of step 0",
    ),
    "attention sinks are dropped under context parallel": PlantedFault(
        context_attention,
        "add_sinks",
        lambda original, out, lse, sinks: (out, lse),
        "gpt_oss",
        "context=2,rotate=alltoall",
        "gradients of step 0",
    ),
    "the state of linear attention crosses the end of a document": PlantedFault(
        context_delta,
        "starts_of_tiles",
        lambda original, *args: torch.zeros_like(original(*args)),
        "linear attention, documents",
        "context=2,balancer=none",
        "gradients of step 0",
    ),
    "attention crosses the end of a document": PlantedFault(
        TokenSelector, "prepare", _ignore_documents, "documents", "tensor=2,recompute=full", "loss"
    ),
    "the blocks have no effect": PlantedFault(
        TransformerBlock,
        "forward",
        _without_effect,
        "SGD",
        "shard=2,accumulate=3",
        "gradients of zero",
        everywhere=True,
    ),
    "the router is cut off": PlantedFault(
        Router,
        "_weigh",
        _ignore_router,
        "experts",
        "tensor=2",
        "gradients of zero",
        everywhere=True,
    ),
}
QUICK = (  # of different kinds; the others run with --planted
    "the update is a thousandth too large",
    "replicas do not sum gradients",
    "the norm counts replicated tensors twice",
    "the gradient of the copy of a tied tensor is dropped",
    "the window has a token more under context parallel",
    "the router is cut off",
)
