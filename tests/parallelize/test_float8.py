"""Which layers become Float8, and that each other one says why not."""

from __future__ import annotations

import logging

import pytest
import torch

from titanlite.models import FAMILIES
from titanlite.parallelize.float8 import AUTO, Float8Config, convert_to_float8, float8_layers

FAMILY = FAMILIES["llama3"]


def model_of(flavor: str):
    with torch.device("meta"):
        return FAMILY.build(FAMILY.flavors[flavor])


def spared_by(recipe: str, *filter_fqns: str, flavor: str = "8B") -> dict[str, str]:
    config = Float8Config(recipe_name=recipe, filter_fqns=list(filter_fqns))
    chosen, left = float8_layers(model_of(flavor), config)
    assert len(chosen) + len(left) == 7 * FAMILY.flavors[flavor].n_layers + 1
    return {name.replace("layers.0.", ""): why for name, why in left.items() if ".1" not in name}


def test_a_filter_is_a_part_of_a_name():
    left = spared_by("tensorwise", "output", "attention.w")
    assert left.pop("output") == "one with the loss"
    named = {name for name in left if "layers" not in name}
    assert named == {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}


@pytest.mark.parametrize(
    "recipe, flavor, small",
    [
        ("tensorwise", "8B", {"attention.wk", "attention.wv"}),  # 1024 x 4096
        ("rowwise", "8B", {"attention.wk", "attention.wv"}),
        ("rowwise", "1B", {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
         | {"feed_forward.w2"}),
    ],
)  # fmt: skip
def test_layers_too_small_to_gain_are_spared_where_that_is_asked(recipe, flavor, small):
    assert spared_by(recipe, flavor=flavor).keys() == {"output"}
    left = spared_by(recipe, AUTO, flavor=flavor)
    assert left.pop("output") == "one with the loss"
    assert {name for name in left if "layers" not in name} == small
    assert all("too small to gain" in why for why in left.values())


def test_a_swap_keeps_names_and_says_what_it_left(caplog):
    model = model_of("quickstart")
    model.layers["0"].attention.wo = torch.nn.Linear(256, 4100, bias=False, device="meta")
    names = [name for name, _ in model.named_parameters()]
    with caplog.at_level(logging.INFO, logger="titanlite"):
        convert_to_float8(model, Float8Config(recipe_name="rowwise", filter_fqns=["attention.wk"]))
    assert [name for name, _ in model.named_parameters()] == names
    assert "23 linear layers are Float8, rowwise" in caplog.text
    assert "attention.wo is not (4100 x 256, no multiples of 16)" in caplog.text
    assert 'layers.*.attention.wk is not ("attention.wk" in filter_fqns)' in caplog.text
