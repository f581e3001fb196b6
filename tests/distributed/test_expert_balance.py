"""Balancing of experts, in every layout: the gradients, weights and biases of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.moe_family import MoESizes
from tests.distributed.oracle import SGD, Layout, with_enough_blocks
from tests.distributed.test_oracle import assert_matches_one_process, join_names
from titanlite.models import ExpertSizes, LoadBalancing

SIZES = MoESizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=88,
    vocab_size=509,
    rope_theta=1e4,
    experts=ExpertSizes(count=6, active=2, hidden_dim=20, shared_dim=16, shared_gate=True),
)
SOFTMAX = replace(
    SGD,
    sizes=SIZES,
    batch=12,
    seq_len=24,
    steps=3,
    balancing=LoadBalancing(aux_loss_coef=0.5, z_loss_coef=0.1),
)
# DeepSeek-V3's router; the bias moves so far in a step that it changes what is selected.
GROUPED = ExpertSizes(
    count=8,
    active=3,
    hidden_dim=20,
    score="sigmoid",
    route_scale=2.5,
    groups=4,
    active_groups=2,
    selection_bias=True,
)
SIGMOID = replace(
    SOFTMAX,
    sizes=replace(SIZES, experts=GROUPED),
    balancing=LoadBalancing(0.5, 0.1, bias_update_rate=0.02),
)

LAYOUTS = [
    [Layout(), Layout(accumulate=3, recompute="full"), Layout(recompute="op")],
    [Layout(shard=2, accumulate=3), Layout(context=2)],
    [Layout(pipeline=2, microbatch=2), Layout(pipeline=2, microbatch=2, schedule="ZBVZeroBubble")],
    [
        Layout(replicate=2, shard=2, expert=2),
        Layout(shard=2, tensor=2, expert=2, expert_tensor=2),
        Layout(tensor=2, context=2, expert=2, recompute="full"),
    ],
    [Layout(shard=2, expert=2, accumulate=3), Layout(tensor=2), Layout(tensor=2, expert=2)],
]


@pytest.mark.parametrize("recipe", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=join_names)
def test_balancing_of_every_layout_matches_one_process(layouts, recipe):
    assert_matches_one_process(
        [(x, with_enough_blocks(recipe, x) if x.pipeline > 1 else recipe) for x in layouts]
    )
