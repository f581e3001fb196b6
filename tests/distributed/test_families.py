"""Every model family, in every kind of layout: the gradients and weights of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.oracle import SGD, Layout, with_enough_blocks
from tests.distributed.test_oracle import assert_matches_one_process, join_names
from titanlite.models.deepseek_v3.model import DeepSeekV3Sizes

LATENT = DeepSeekV3Sizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    hidden_dim=88,
    vocab_size=509,
    n_dense_layers=1,
    n_experts=4,
    n_active_experts=2,
    expert_hidden_dim=24,
    n_expert_groups=2,
    n_active_groups=1,
    route_scale=2.5,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
RECIPE = replace(SGD, sizes=LATENT, batch=12, seq_len=24, steps=2)
LAYOUTS = [
    [Layout(), Layout(accumulate=3, recompute="op")],
    [
        Layout(shard=2),
        Layout(shard=2, expert=2),
        Layout(tensor=2),
        Layout(tensor=2, expert=2),
        Layout(context=2),
        Layout(pipeline=2, microbatch=2),
    ],
]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=join_names)
def test_every_layout_matches_one_process(layouts):
    assert_matches_one_process(
        [(x, with_enough_blocks(RECIPE, x) if x.pipeline > 1 else RECIPE) for x in layouts]
    )
