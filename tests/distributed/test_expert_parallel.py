"""Experts on other ranks, in every layout: the gradients and weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.moe_family import MoESizes
from tests.distributed.oracle import SGD, Layout, Recipe, with_enough_blocks
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_oracle import assert_matches_one_process, join_names
from tests.distributed.test_replica_check import findings_of
from titanlite.models import ExpertSizes

EXPERTS = ExpertSizes(count=4, active=2, hidden_dim=24, shared_dim=16)
SIZES = MoESizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=88,
    vocab_size=509,
    rope_theta=1e4,
    experts=EXPERTS,
)
RECIPE = replace(SGD, sizes=SIZES, batch=12, seq_len=24, steps=2)


def recipe_for(layout: Layout, recipe: Recipe = RECIPE) -> Recipe:
    """The recipe with as many blocks as the layout needs."""
    return with_enough_blocks(recipe, layout) if layout.pipeline > 1 else recipe


LAYOUTS = [
    [Layout()],
    [
        Layout(tensor=2),  # no expert parallel: each expert is sharded
        Layout(tensor=2, expert=2),
        Layout(context=2, expert=2),
        Layout(shard=2, expert=2, accumulate=3, reduction="last_microbatch", recompute="full"),
        Layout(shard=2, expert=2, accumulate=3, reshard="always", recompute="op"),
        Layout(shard=2, expert=2, compile="aot_eager"),
        Layout(shard=2, expert=2, offload=True),
        Layout(shard=2, expert=2, early=True, reduction="last_microbatch"),
    ],
    [
        Layout(shard=4, expert=4),
        Layout(shard=2, tensor=2, expert=2),
        Layout(shard=2, tensor=2, expert=2, expert_tensor=2),
        Layout(replicate=2, shard=2, expert=2, accumulate=3),
        Layout(context=2, tensor=2, expert=4, rotate="alltoall", recompute="full"),
    ],
    [
        Layout(pipeline=2, shard=2, expert=2, microbatch=2),
        Layout(pipeline=2, tensor=2, expert=2, microbatch=2, recompute="full"),
        Layout(pipeline=2, context=2, expert=2, microbatch=2),
        Layout(pipeline=2, shard=2, expert=2, microbatch=1, schedule="ZBVZeroBubble"),
        Layout(pipeline=2, shard=2, expert=2, microbatch=1, schedule="DualPipeV"),
    ],
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=join_names)
def test_every_layout_of_experts_matches_one_process(layouts):
    assert_matches_one_process([(layout, recipe_for(layout)) for layout in layouts])


CLIPPED = replace(RECIPE, optimizer="AdamW", max_norm=0.1, lr=1e-3)
SHARDED = Layout(shard=2, tensor=2, expert=2, expert_tensor=2)


def test_optimizers_and_documents_match_one_process():
    cases = [
        (SHARDED, CLIPPED),
        (Layout(pipeline=2, tensor=2, expert=2, microbatch=2), CLIPPED),
        (SHARDED, replace(RECIPE, adaptive=5e-4)),
        (Layout(replicate=2, shard=2, expert=2), replace(RECIPE, adaptive=5e-4)),
        (SHARDED, replace(RECIPE, optimizer="Muon", lr=1e-3)),
        (SHARDED, replace(RECIPE, documents=True)),
    ]
    assert_matches_one_process([(layout, recipe_for(layout, recipe)) for layout, recipe in cases])


# A token has one of 8 experts, and there are so few tokens that some ranks of experts get none.
SPARSE = replace(
    RECIPE,
    sizes=replace(SIZES, experts=ExpertSizes(8, active=1, hidden_dim=24, normalize=False)),
    batch=4,
    seq_len=2,
)


def test_experts_without_tokens_match_one_process():
    layouts = [
        Layout(shard=4, expert=4),
        Layout(shard=2, tensor=2, expert=4, recompute="full"),
    ]
    assert_matches_one_process([(layout, SPARSE) for layout in layouts])


def test_a_flipped_bit_of_an_expert_names_its_replicas():
    layout, expert = Layout(replicate=2, shard=2, expert=2), "layers.1.moe.experts.w2"
    case = (layout, 3, expert)
    for ((healthy, damaged),) in run_on_ranks(findings_of, 4, [case], RECIPE):
        assert healthy == []
        assert [finding[0] for finding in damaged] == [[1, 3]]


def test_a_flipped_bit_of_a_selection_bias_is_found_on_all_ranks_that_have_it():
    """It is no parameter, but it selects experts: ranks would route the same token differently."""
    sizes = replace(SIZES, experts=replace(EXPERTS, score="sigmoid", selection_bias=True))
    bias, recipe = "layers.1.moe.router.expert_bias", replace(RECIPE, sizes=sizes)
    cases = [(layout, 1, bias) for layout in (Layout(replicate=2), Layout(shard=2, expert=2))]
    for rank in run_on_ranks(findings_of, 2, cases, recipe):
        for healthy, damaged in rank:
            assert healthy == []
            assert [(finding[0], finding[3]) for finding in damaged] == [([0, 1], bias)]
