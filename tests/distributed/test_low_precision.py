"""In bf16 and fp16, every layout's gradients are as good as those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.distributed.low_precision import LOWER, RECIPE, SHAPE, Case, check_cases
from tests.distributed.oracle import Layout, Recipe, deepened

# Each in bf16 and in fp16.
LAYOUTS = [
    [Layout(), Layout(accumulate=3)],
    [
        Layout(shard=2),
        Layout(tensor=2),
        Layout(context=2),
        Layout(context=2, balancer="none"),
        Layout(context=2, rotate="alltoall"),
        Layout(context=2, rotate="alltoall", balancer="none"),
        Layout(pipeline=2, microbatch=1),
        Layout(pipeline=2, microbatch=1, schedule="ZBVZeroBubble"),
    ],
    [Layout(tensor=4)],  # more ranks than key-value heads
]
# Each in one of the two, in turn: they compute as the layouts above do.
OPTIONS = [
    [
        Layout(recompute="full"),
        Layout(accumulate=3, reduction="last_microbatch"),
        Layout(offload=True, recompute="selective"),
        Layout(offload_activations=True, chunk=100),
        Layout(compile="aot_eager"),
        Layout(recompute="op"),
    ],
    [
        Layout(replicate=2, reshard="always"),
        Layout(shard=2, accumulate=3, reduction="last_microbatch"),
        Layout(shard=2, early=True),
        Layout(shard=2, reshard="never", offload=True, recompute="op", chunk=100),
        Layout(tensor=2, loss_parallel=False, chunk=100),
        Layout(tensor=2, accumulate=3, reduction="last_microbatch"),
        Layout(tensor=2, recompute="op"),
        Layout(tensor=2, recompute="selective", offload_activations=True),
        Layout(context=2, accumulate=3, recompute="full"),
        Layout(context=2, rotate="alltoall", offload_activations=True),
        Layout(context=2, rotate="alltoall", balancer="none", recompute="op"),
    ],
    [
        Layout(pipeline=2, microbatch=3, schedule="GPipe"),
        Layout(pipeline=2, microbatch=3, schedule="Interleaved1F1B", stages=6),
        Layout(pipeline=2, microbatch=3, schedule="LoopedBFS"),
        Layout(pipeline=2, microbatch=3, schedule="InterleavedZeroBubble"),
        Layout(pipeline=2, microbatch=3, schedule="DualPipeV"),
        Layout(pipeline=2, microbatch=3, schedule="ZBVZeroBubble", recompute="full", chunk=50),
        Layout(pipeline=2, microbatch=3, reshard="always", recompute="op", offload=True),
        Layout(pipeline=2, microbatch=3, accumulate=2, offload_activations=True),
    ],
    [
        Layout(shard=2, tensor=2),
        Layout(replicate=2, shard=2),
        Layout(context=2, tensor=2, balancer="none"),
        Layout(context=2, shard=2, rotate="alltoall"),
        Layout(pipeline=2, tensor=2, microbatch=6),
        Layout(pipeline=2, shard=2, microbatch=3, schedule="ZBVZeroBubble"),
        Layout(pipeline=2, context=2, microbatch=6, schedule="Interleaved1F1B"),
        Layout(context=4, rotate="alltoall"),
    ],
]
DOCUMENTED = [
    [
        Layout(tensor=2),
        Layout(context=2),
        Layout(context=2, rotate="alltoall", balancer="none", recompute="full"),
        Layout(pipeline=2, microbatch=6, schedule="ZBVZeroBubble"),
    ],
    [Layout(pipeline=2, context=2, microbatch=6)],
]


def case_of(layout: Layout, recipe: Recipe, compute: torch.dtype) -> Case:
    return Case(layout, deepened(recipe, layout) if layout.pipeline > 1 else recipe, compute)


def in_both(layouts: Sequence[Layout], recipe: Recipe = RECIPE) -> list[Case]:
    return [case_of(layout, recipe, dtype) for layout in layouts for dtype in LOWER]


def in_turn(layouts: Sequence[Layout], recipe: Recipe = RECIPE) -> list[Case]:
    """Cases in bf16 and fp16 by turns."""
    return [case_of(layout, recipe, LOWER[n % 2]) for n, layout in enumerate(layouts)]


def by_ranks(groups: Sequence[Sequence[Layout]]):
    names = [f"{group[0].degrees.ranks} ranks, {number}" for number, group in enumerate(groups)]
    return pytest.mark.parametrize("layouts", groups, ids=names)


@by_ranks(LAYOUTS)
def test_every_gradient_of_a_layout_is_as_good_as_that_of_one_process(layouts):
    check_cases(in_both(layouts))


@by_ranks(OPTIONS)
def test_no_option_costs_a_gradient_precision(layouts):
    check_cases(in_turn(layouts))


@by_ranks(DOCUMENTED)
def test_documents_cost_no_gradient_precision(layouts):
    check_cases(in_turn(layouts, replace(RECIPE, documents=True)))


def test_z_loss_costs_no_gradient_precision():
    layouts = [Layout(tensor=2, chunk=100), Layout(tensor=2, loss_parallel=False)]
    check_cases(in_turn(layouts, replace(RECIPE, z_loss=0.01)))


def test_tied_embeddings_cost_no_gradient_precision():
    """Their gradient is the sum of two."""
    shape = replace(SHAPE, tied_embeddings=True, qk_norm=False)
    check_cases(in_turn([Layout(tensor=2), Layout(context=2)], replace(RECIPE, shape=shape)))


def test_float8_is_as_good_under_every_layout():
    layouts = (Layout(shard=2), Layout(tensor=2), Layout(context=2))
    check_cases([Case(layout, float8="tensorwise") for layout in layouts])
