"""A model is cut where it costs least, or where the user says, and nothing of it is lost."""

from __future__ import annotations

import itertools
import random

import pytest

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.models import FAMILIES
from titanlite.parallelize.stage_partition import balance_stages, partition_model, requested_stages

FAMILY = FAMILIES["llama3"]
COSTS = FAMILY.module_flops(FAMILY.flavors["8B"], 8192)


def cut_by(costs=COSTS, otherwise=4, **keys) -> list[list[str]]:
    section = ParallelismConfig(
        pipeline_parallel_degree=4, **{f"pipeline_parallel_{k}": v for k, v in keys.items()}
    )
    stages, _ = requested_stages(section, FAMILY.flavors["8B"].n_layers, otherwise)
    return partition_model(section, costs, FAMILY.blocks_path, stages)


def blocks_of(stages) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


def test_costs_are_the_flops_that_mfu_counts():
    total = FAMILY.flops_per_token(FAMILY.flavors["8B"], 8192)
    assert sum(COSTS.values()) == pytest.approx(total, rel=1e-3)
    assert list(COSTS) == ["tok_embeddings", *(f"layers.{n}" for n in range(32)), "norm", "output"]


@pytest.mark.parametrize("seed", range(20))
def test_the_dearest_stage_is_as_cheap_as_any_cut_makes_it(seed):
    dice = random.Random(seed)
    costs = {f"m{n}": dice.choice([0.1, 1, 2, 5]) * dice.random() for n in range(9)}
    stages, values = dice.randint(1, 6), list(costs.values())
    found = balance_stages(costs, stages)
    assert [name for stage in found for name in stage] == list(costs) and all(found)
    best = min(
        max(sum(values[a:b]) for a, b in itertools.pairwise((0, *edges, len(values))))
        for edges in itertools.combinations(range(1, len(values)), stages - 1)
    )
    assert max(sum(costs[n] for n in stage) for stage in found) == pytest.approx(best)


def test_evenness_does_not_make_the_dearest_stage_dearer():
    costs = dict(zip("abcdef", (8, 8, 5, 5, 8, 2), strict=True))
    found = balance_stages(costs, 3)  # 16, 10, 10 would be more even, and slower
    assert [sum(costs[name] for name in stage) for stage in found] == [8, 13, 15]


def test_a_stage_with_the_output_layer_has_fewer_blocks():
    stages = cut_by(otherwise=8)
    assert blocks_of(stages)[-1] < blocks_of(stages)[0]
    costs = [sum(COSTS[name] for name in stage) for stage in stages]
    assert max(costs) < 1.2 * sum(costs) / len(costs)


def test_blocks_by_number_are_what_was_asked_for():
    assert blocks_of(cut_by(layers_per_stage=4)) == [4] * 8
    assert blocks_of(cut_by(layers_per_stage=5)) == [5] * 6 + [2]
    less = {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
    assert blocks_of(cut_by(**less)) == [8, 9, 8, 7]  # torchtitan's: (32 + 2) / 4, then less
    assert blocks_of(cut_by(first_stage_less_layers=0)) == [8, 8, 8, 8]
    assert blocks_of(cut_by(layers_per_stage=3, last_stage_less_layers=1)) == [3] * 10 + [2]


def test_every_cut_has_every_module_once_in_order():
    for keys in ({}, {"layers_per_stage": 4}, {"first_stage_less_layers": 2}):
        assert [name for stage in cut_by(**keys) for name in stage] == list(COSTS)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda parts: parts[1].append("layers.99"), '"layers.99" is no module of the model'),
        (lambda parts: parts[0].remove("layers.0"), "no stage has layers.0"),
        (lambda parts: parts[1].append("layers.0"), "named twice"),
        (lambda parts: parts[0].reverse(), "not in the order"),
        (lambda parts: parts.append([]), "a stage is empty"),
    ],
)
def test_modules_named_wrongly_are_refused(change, words):
    names = list(COSTS)
    parts = [names[:10], names[10:]]
    change(parts)
    section = ParallelismConfig(pipeline_parallel_degree=2, module_fqns_per_model_part=parts)
    with pytest.raises(ConfigError, match=words):
        partition_model(section, COSTS, FAMILY.blocks_path, len(parts))


def test_stages_that_nothing_would_be_left_for_are_refused():
    with pytest.raises(ConfigError, match="33 stages of 32 blocks"):
        cut_by(otherwise=33)
    with pytest.raises(ConfigError, match="leave -1 blocks for the first"):
        cut_by(first_stage_less_layers=12)
