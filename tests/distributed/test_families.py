"""Every layout of every family computes what one process computes."""

from __future__ import annotations

from dataclasses import replace

from tests.distributed.oracle import SGD, Layout, Recipe
from tests.distributed.qkv_bias_family import QKV_BIAS_FAMILY
from tests.distributed.test_oracle import assert_matches_one_process
from titanlite.models import FAMILIES

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 88, "vocab_size": 509}
GROUPED = {**SMALL, "n_kv_heads": 2}
EXPERTS = {name: size for name, size in SMALL.items() if name != "hidden_dim"}
EXPERTS |= {"n_experts": 4, "n_active_experts": 2, "expert_hidden_dim": 24}
CHANGES = {  # family -> changes of its debugmodel; the window crosses the shards of a sequence
    "qwen3": {**GROUPED, "head_dim": 12},
    "mistral": {**GROUPED, "window": 17},
    "gpt2": {**SMALL, "positions": 96},
    "olmo2": GROUPED,
    "mixtral": {**EXPERTS, "n_kv_heads": 2},
    "qwen3_moe": {**EXPERTS, "n_kv_heads": 2, "head_dim": 12},
    "deepseek_v3": {
        **SMALL,
        **EXPERTS,
        "n_expert_groups": 2,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")


def recipe_of(family: str, **changes) -> Recipe:
    """A short run of a small model."""
    sizes = replace(next(iter(FAMILIES[family].flavors.values())), **CHANGES[family])
    recipe = replace(SGD, steps=2, batch=12, lr=0.2, sizes=sizes)
    return replace(recipe, **changes)


def cases_of(layouts: list[Layout], *families: str, **changes) -> list[tuple[Layout, Recipe]]:
    """Each layout with each family, all if none is named."""
    recipes = [recipe_of(family, **changes) for family in families or CHANGES]
    return [(layout, recipe) for layout in layouts for recipe in recipes]


# With RoPE, the gradient of the keys' biases is not zero.
QKV_BIASES = replace(SGD, steps=2, batch=12, lr=0.2, sizes=QKV_BIAS_FAMILY.flavors["mini"])


def test_every_family_matches_one_process_on_2_ranks():
    layouts = [Layout(shard=2), Layout(tensor=2), Layout(context=2, rotate="alltoall")]
    with_experts = [Layout(shard=2, expert=2), Layout(tensor=2, expert=2)]
    cases = cases_of(layouts) + cases_of(with_experts, *WITH_EXPERTS)
    assert_matches_one_process([*cases, *((layout, QKV_BIASES) for layout in layouts)])


def test_every_family_matches_one_process_on_4_ranks():
    cases = cases_of([Layout(shard=2, tensor=2), Layout(replicate=2, shard=2)])
    # more ranks than key-value heads, whose norm then is replicated
    cases += [*cases_of([Layout(tensor=4)], "olmo2"), (Layout(tensor=4), QKV_BIASES)]
    assert_matches_one_process(cases)


def test_a_router_of_one_active_expert_is_trained_alike_in_every_layout():
    """Muon makes full-size updates of a gradient that is only rounding."""
    recipe = recipe_of("qwen3_moe", optimizer="Muon", lr=1e-2)
    recipe = replace(recipe, sizes=replace(recipe.sizes, n_active_experts=1))
    layouts = [Layout(shard=2, expert=2), Layout(context=2, expert=2)]
    assert_matches_one_process([(layout, recipe) for layout in layouts])


def test_every_family_matches_one_process_in_a_pipeline():
    assert_matches_one_process(cases_of([Layout(pipeline=2, microbatch=6)]))


def test_documents_match_separate_sequences_with_a_window_and_with_learned_positions():
    cases = cases_of([Layout(context=2)], "mistral", "gpt2", documents=True)
    assert_matches_one_process(cases + cases_of([Layout(tensor=2)], "gpt2", documents=True))
