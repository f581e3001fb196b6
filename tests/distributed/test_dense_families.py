"""Every layout of every dense family computes what one process computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.oracle import SGD, Layout, Recipe
from tests.distributed.test_oracle import assert_matches_one_process
from titanlite.models import FAMILIES

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 88, "vocab_size": 509}
GROUPED = {**SMALL, "n_kv_heads": 2}
CHANGES = {  # family -> changes of its debugmodel; the window crosses the shards of a sequence
    "qwen3": {**GROUPED, "head_dim": 12},
    "mistral": {**GROUPED, "window": 17},
    "gpt2": {**SMALL, "positions": 96},
    "olmo2": GROUPED,
}


def recipe_of(family: str, **changes) -> Recipe:
    """A short run of a small model."""
    sizes = replace(FAMILIES[family].flavors["debugmodel"], **CHANGES[family])
    recipe = replace(SGD, steps=2, batch=12, lr=0.2, sizes=sizes)
    return replace(recipe, **changes)


def cases_of(layouts: list[Layout], **changes) -> list[tuple[Layout, Recipe]]:
    """Each layout with each family; tied embeddings cannot be split over pipeline stages."""
    recipes = [recipe_of(family, **changes) for family in CHANGES]
    return [
        (layout, recipe)
        for layout in layouts
        for recipe in recipes
        if layout.pipeline == 1 or not recipe.spec.tied_parameters(recipe.sizes)
    ]


@pytest.mark.parametrize(
    "layouts",
    [
        [
            Layout(shard=2, accumulate=3),
            Layout(tensor=2, accumulate=3),
            Layout(context=2, rotate="alltoall"),
            Layout(pipeline=2, microbatch=6),
        ],
        [Layout(shard=2, tensor=2), Layout(tensor=4), Layout(replicate=2, shard=2)],
    ],
    ids=["2 ranks", "4 ranks"],
)
def test_every_family_matches_one_process(layouts):
    assert_matches_one_process(cases_of(layouts))


def test_documents_of_every_family_match_separate_sequences():
    layouts = [Layout(tensor=2), Layout(context=2)]
    assert_matches_one_process(cases_of(layouts, documents=True))
