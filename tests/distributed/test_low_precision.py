"""In bf16 and fp16, the gradients of every layout are as accurate as those of one process."""

from __future__ import annotations

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
from tests.distributed.oracle import Recipe, fit_recipe, parse_layouts
from tests.distributed.recipes import FURTHER_TOKENS, recipe_of

LAYOUTS = (  # each in bf16 and in fp16; 4 tensor-parallel ranks are more than key-value heads
    "accumulate=3",
    "shard=2; tensor=2; context=2; pipeline=2,microbatch=3,schedule=ZBVZeroBubble",
    "tensor=4",
)
OPTIONS = (  # alternately in bf16 and in fp16: options of the layouts above
    "recompute=full; accumulate=3,reduction=last_microbatch; offload=True,recompute=selective;"
    "offload_activations=True,chunk=100; compile=aot_eager; recompute=op",
    "replicate=2,reshard=always; shard=2,accumulate=3,reduction=last_microbatch;"
    "shard=2,early=True; shard=2,reshard=never,offload=True,recompute=op,chunk=100;"
    "tensor=2,loss_parallel=False,chunk=100,recompute=op;"
    "tensor=2,accumulate=2,reduction=last_microbatch,recompute=selective,offload_activations=True;"
    "context=2,accumulate=3,recompute=full; context=2,rotate=alltoall,offload_activations=True;"
    "context=2,rotate=alltoall,balancer=none,recompute=op; context=2,balancer=none",
    "pipeline=2,microbatch=3,schedule=Interleaved1F1B,stages=6;"
    "pipeline=2,microbatch=3,schedule=ZBVZeroBubble,recompute=full,chunk=50;"
    "pipeline=2,microbatch=3,reshard=always,recompute=op,offload=True;"
    "pipeline=2,microbatch=3,accumulate=2,offload_activations=True",
    "pipeline=2,tensor=2,microbatch=6; shard=2,tensor=2",
)
MORE_OPTIONS = (  # with `--layouts 2`: test_oracle.py has them in fp32
    "pipeline=2,microbatch=3,schedule=InterleavedZeroBubble;"
    "pipeline=2,microbatch=3,schedule=DualPipeV; pipeline=2,microbatch=3,schedule=GPipe;"
    "pipeline=2,microbatch=3,schedule=LoopedBFS",
    "replicate=2,shard=2; context=2,shard=2,rotate=alltoall; context=2,tensor=2,balancer=none;"
    "pipeline=2,shard=2,microbatch=3,schedule=ZBVZeroBubble; context=4,rotate=alltoall;"
    "pipeline=2,context=2,microbatch=6,schedule=Interleaved1F1B",
)
DOCUMENTED = (
    "tensor=2; context=2; context=2,rotate=alltoall,balancer=none,recompute=full;"
    "pipeline=2,microbatch=6,schedule=ZBVZeroBubble"
)


def in_both_dtypes(text: str) -> list[PrecisionCase]:
    return [
        PrecisionCase(layout, fit_recipe(RECIPE, layout), dtype)
        for layout in parse_layouts(text)
        for dtype in LOW_PRECISION_DTYPES
    ]


def in_alternating_dtypes(text: str, recipe: Recipe = RECIPE) -> list[PrecisionCase]:
    return [
        PrecisionCase(layout, fit_recipe(recipe, layout), LOW_PRECISION_DTYPES[number % 2])
        for number, layout in enumerate(parse_layouts(text))
    ]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_gradients_of_every_layout_are_as_accurate_as_on_one_process(layouts):
    check_cases(in_both_dtypes(layouts))


def pytest_generate_tests(metafunc) -> None:
    if metafunc.function is test_options_do_not_make_gradients_less_accurate:
        more = MORE_OPTIONS if metafunc.config.getoption("--layouts") > 1 else ()
        metafunc.parametrize("layouts", [*OPTIONS, *more])


def test_options_do_not_make_gradients_less_accurate(layouts):
    check_cases(in_alternating_dtypes(layouts))


def test_document_masks_do_not_make_gradients_less_accurate():
    check_cases(in_alternating_dtypes(DOCUMENTED, replace(RECIPE, documents=True)))


def test_z_loss_does_not_make_gradients_less_accurate():
    layouts = "tensor=2,chunk=100; tensor=2,loss_parallel=False"
    check_cases(in_alternating_dtypes(layouts, replace(RECIPE, z_loss=0.01)))


def test_tied_embeddings_do_not_make_gradients_less_accurate():
    """Their gradient is the sum of that of the embedding and that of the output layer."""
    sizes = replace(SIZES, tied_embeddings=True, qk_norm=False)
    check_cases(in_alternating_dtypes("tensor=2; context=2", replace(RECIPE, sizes=sizes)))


def test_float8_is_as_accurate_under_every_layout_as_on_one_process():
    layouts = parse_layouts("shard=2; tensor=2; context=2")
    check_cases([PrecisionCase(layout, float8="tensorwise") for layout in layouts])


@pytest.mark.parametrize(
    "family, layouts",  # both kinds of router
    [
        ("qwen3_moe", "tensor=2,expert=2,accumulate=2"),
        ("gpt_oss", "context=2; tensor=2,expert=2,recompute=full"),
        ("deepseek_v3", "tensor=2; shard=2,expert=2,recompute=full"),
    ],
)
def test_families_with_experts_are_as_accurate_under_every_layout_as_on_one_process(
    family, layouts
):
    """Rounding selects other experts for a few tokens, on one process as in a layout."""
    sizes = FURTHER_TOKENS.sizes if family == "deepseek_v3" else recipe_of(family).sizes
    batch = RECIPE.batch - (family == "deepseek_v3")  # with idle sequences
    recipe = replace(RECIPE, sizes=sizes, batch=batch)
    cases = [PrecisionCase(x, recipe, batches=5) for x in parse_layouts(layouts)]
    check_cases([*cases, *(replace(c, compute=torch.float16) for c in cases[-1:] if batch % 2)])
