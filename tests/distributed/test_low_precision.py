"""In bf16 and fp16, the gradients of every layout are as accurate as those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.distributed.low_precision import (
    LOW_PRECISION_DTYPES,
    RECIPE,
    SIZES,
    PrecisionCase,
    check_cases,
)
from tests.distributed.oracle import Layout, Recipe, with_enough_blocks
from tests.distributed.test_families import WITH_EXPERTS, recipe_of

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
# Alternately in bf16 and in fp16: options of the layouts above.
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


def build_case(layout: Layout, recipe: Recipe, compute: torch.dtype) -> PrecisionCase:
    return PrecisionCase(
        layout, with_enough_blocks(recipe, layout) if layout.pipeline > 1 else recipe, compute
    )


def in_both_dtypes(layouts: Sequence[Layout], recipe: Recipe = RECIPE) -> list[PrecisionCase]:
    return [
        build_case(layout, recipe, dtype) for layout in layouts for dtype in LOW_PRECISION_DTYPES
    ]


def in_alternating_dtypes(
    layouts: Sequence[Layout], recipe: Recipe = RECIPE
) -> list[PrecisionCase]:
    return [
        build_case(layout, recipe, LOW_PRECISION_DTYPES[n % 2]) for n, layout in enumerate(layouts)
    ]


def parametrize_groups(groups: Sequence[Sequence[Layout]]):
    names = [f"{group[0].degrees.ranks} ranks, {number}" for number, group in enumerate(groups)]
    return pytest.mark.parametrize("layouts", groups, ids=names)


@parametrize_groups(LAYOUTS)
def test_gradients_of_every_layout_are_as_accurate_as_on_one_process(layouts):
    check_cases(in_both_dtypes(layouts))


@parametrize_groups(OPTIONS)
def test_options_do_not_make_gradients_less_accurate(layouts):
    check_cases(in_alternating_dtypes(layouts))


@parametrize_groups(DOCUMENTED)
def test_document_masks_do_not_make_gradients_less_accurate(layouts):
    check_cases(in_alternating_dtypes(layouts, replace(RECIPE, documents=True)))


def test_z_loss_does_not_make_gradients_less_accurate():
    layouts = [Layout(tensor=2, chunk=100), Layout(tensor=2, loss_parallel=False)]
    check_cases(in_alternating_dtypes(layouts, replace(RECIPE, z_loss=0.01)))


def test_tied_embeddings_do_not_make_gradients_less_accurate():
    """Their gradient is the sum of that of the embedding and that of the output layer."""
    sizes = replace(SIZES, tied_embeddings=True, qk_norm=False)
    check_cases(
        in_alternating_dtypes([Layout(tensor=2), Layout(context=2)], replace(RECIPE, sizes=sizes))
    )


def test_float8_is_as_accurate_under_every_layout_as_on_one_process():
    layouts = (Layout(shard=2), Layout(tensor=2), Layout(context=2))
    check_cases([PrecisionCase(layout, float8="tensorwise") for layout in layouts])


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_families_with_experts_are_as_accurate_under_every_layout_as_on_one_process(family):
    """Rounding selects other experts for a few tokens, on one process as in a layout."""
    recipe = replace(RECIPE, sizes=recipe_of(family).sizes)
    layouts = [
        Layout(tensor=2),
        Layout(shard=2, expert=2, recompute="full"),
        Layout(tensor=2, expert=2, accumulate=3),
    ]
    check_cases([PrecisionCase(layout, recipe, batches=7) for layout in layouts])
