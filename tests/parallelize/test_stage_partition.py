"""Pipeline stages are balanced by cost or set by the user, and contain every module once."""

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


def partition(costs=COSTS, default_stages=4, **keys) -> list[list[str]]:
    config = ParallelismConfig(
        pipeline_parallel_degree=4, **{f"pipeline_parallel_{k}": v for k, v in keys.items()}
    )
    stages, _ = requested_stages(config, FAMILY.flavors["8B"].n_layers, default_stages)
    return partition_model(config, costs, FAMILY.blocks_path, stages)


def block_counts(stages) -> list[int]:
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


def test_costs_are_the_flops_that_mfu_counts():
    total = FAMILY.flops_per_token(FAMILY.flavors["8B"], 8192)
    assert sum(COSTS.values()) == pytest.approx(total, rel=1e-3)
    assert list(COSTS) == ["tok_embeddings", *(f"layers.{n}" for n in range(32)), "norm", "output"]


@pytest.mark.parametrize("seed", range(20))
def test_no_partition_has_a_cheaper_most_expensive_stage(seed):
    dice = random.Random(seed)
    costs = {f"m{n}": dice.choice([0.1, 1, 2, 5]) * dice.random() for n in range(9)}
    stages, values = dice.randint(1, 6), list(costs.values())
    balanced = balance_stages(costs, stages)
    assert [name for stage in balanced for name in stage] == list(costs) and all(balanced)
    best = min(
        max(sum(values[a:b]) for a, b in itertools.pairwise((0, *edges, len(values))))
        for edges in itertools.combinations(range(1, len(values)), stages - 1)
    )
    assert max(sum(costs[n] for n in stage) for stage in balanced) == pytest.approx(best)


def test_balance_does_not_make_the_most_expensive_stage_more_expensive():
    costs = dict(zip("abcdef", (8, 8, 5, 5, 8, 2), strict=True))
    balanced = balance_stages(costs, 3)  # 16, 10, 10 would be more even, and slower
    assert [sum(costs[name] for name in stage) for stage in balanced] == [8, 13, 15]


def test_a_stage_with_the_output_layer_has_fewer_blocks():
    stages = partition(default_stages=8)
    assert block_counts(stages)[-1] < block_counts(stages)[0]
    costs = [sum(COSTS[name] for name in stage) for stage in stages]
    assert max(costs) < 1.2 * sum(costs) / len(costs)


def test_stages_have_the_requested_number_of_blocks():
    assert block_counts(partition(layers_per_stage=4)) == [4] * 8
    assert block_counts(partition(layers_per_stage=5)) == [5] * 6 + [2]
    less = {"first_stage_less_layers": 1, "last_stage_less_layers": 1}
    assert block_counts(partition(**less)) == [8, 9, 8, 7]  # torchtitan's: (32 + 2) / 4, then less
    assert block_counts(partition(first_stage_less_layers=0)) == [8, 8, 8, 8]
    assert block_counts(partition(layers_per_stage=3, last_stage_less_layers=1)) == [3] * 10 + [2]


def test_every_partition_has_every_module_once_in_order():
    for keys in ({}, {"layers_per_stage": 4}, {"first_stage_less_layers": 2}):
        assert [name for stage in partition(**keys) for name in stage] == list(COSTS)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda stages: stages[1].append("layers.99"), '"layers.99" is not a module of the model'),
        (lambda stages: stages[0].remove("layers.0"), "no stage has layers.0"),
        (lambda stages: stages[1].append("layers.0"), "listed twice"),
        (lambda stages: stages[0].reverse(), "not in execution order"),
        (lambda stages: stages.append([]), "a stage is empty"),
    ],
)
def test_a_wrong_list_of_modules_is_rejected(change, message):
    names = list(COSTS)
    stages = [names[:10], names[10:]]
    change(stages)
    config = ParallelismConfig(pipeline_parallel_degree=2, module_fqns_per_model_part=stages)
    with pytest.raises(ConfigError, match=message):
        partition_model(config, COSTS, FAMILY.blocks_path, len(stages))


def test_more_stages_than_blocks_are_rejected():
    with pytest.raises(ConfigError, match="degree = 4: makes 9{30} stages of 32 blocks"):
        requested_stages(ParallelismConfig(pipeline_parallel_degree=4), 32, int("9" * 30))
    with pytest.raises(ConfigError, match="layers_per_stage = 1: makes 33 stages of 32 blocks"):
        partition(layers_per_stage=1, first_stage_less_layers=1)
    with pytest.raises(ConfigError, match="leave -1 blocks for the first"):
        partition(first_stage_less_layers=12)
