"""Which linear layers become Float8, and the reason that is logged for each other one."""

from __future__ import annotations

import logging

import pytest
import torch

from titanlite.models import FAMILIES
from titanlite.parallelize.float8 import (
    AUTO_FILTER,
    Float8Config,
    convert_to_float8,
    select_float8_layers,
)

FAMILY = FAMILIES["llama3"]


def build_on_meta(flavor: str):
    with torch.device("meta"):
        return FAMILY.build(FAMILY.flavors[flavor])


def excluded_layers(recipe: str, *filter_fqns: str, flavor: str = "8B") -> dict[str, str]:
    """Reason for every layer of the first block, and for the output layer, that is not Float8."""
    config = Float8Config(recipe_name=recipe, filter_fqns=list(filter_fqns))
    selected, excluded = select_float8_layers(build_on_meta(flavor), config)
    assert len(selected) + len(excluded) == 7 * FAMILY.flavors[flavor].n_layers + 1
    return {
        name.replace("layers.0.", ""): reason
        for name, reason in excluded.items()
        if not name.startswith("layers.") or name.startswith("layers.0.")
    }


def test_a_filter_matches_a_part_of_a_name():
    excluded = excluded_layers("tensorwise", "output", "attention.w")
    assert excluded.pop("output") == "fused with the loss"
    assert excluded.keys() == {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}


@pytest.mark.parametrize(
    "recipe, flavor, small",
    [
        ("tensorwise", "8B", {"attention.wk", "attention.wv"}),  # 1024 x 4096
        ("rowwise", "8B", {"attention.wk", "attention.wv"}),
        ("rowwise", "1B", {f"attention.{name}" for name in ("wq", "wk", "wv", "wo")}
         | {"feed_forward.w2"}),
    ],
)  # fmt: skip
def test_the_auto_filter_excludes_layers_too_small_to_be_faster(recipe, flavor, small):
    assert excluded_layers(recipe, flavor=flavor).keys() == {"output"}
    excluded = excluded_layers(recipe, AUTO_FILTER, flavor=flavor)
    assert excluded.pop("output") == "fused with the loss"
    assert excluded.keys() == small
    assert all("too small to be faster" in reason for reason in excluded.values())


def test_conversion_does_not_rename_parameters_and_logs_excluded_layers(caplog):
    model = build_on_meta("quickstart")
    model.layers["0"].attention.wo = torch.nn.Linear(256, 4100, bias=False, device="meta")
    names = [name for name, _ in model.named_parameters()]
    with caplog.at_level(logging.INFO, logger="titanlite"):
        convert_to_float8(model, Float8Config(recipe_name="rowwise", filter_fqns=["attention.wk"]))
    assert [name for name, _ in model.named_parameters()] == names
    assert "float8 rowwise in 23 linear layers; in high precision: " in caplog.text
    assert "attention.wo (4100x256 is not a multiple of 16)" in caplog.text
    assert 'layers.*.attention.wk ("attention.wk" in filter_fqns)' in caplog.text
