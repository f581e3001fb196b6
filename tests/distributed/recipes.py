"""What the layouts train beside the oracle's Llama: every family, and experts of all kinds."""

from __future__ import annotations

from dataclasses import replace

from tests.distributed.moe_family import MoESizes
from tests.distributed.oracle import SGD, Recipe
from titanlite.models import FAMILIES, ExpertSizes, LoadBalancing

SMALL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 88, "vocab_size": 509}
GROUPED = {**SMALL, "n_kv_heads": 2}
EXPERTS = {name: size for name, size in SMALL.items() if name != "hidden_dim"}
EXPERTS |= {"n_experts": 4, "n_active_experts": 2, "expert_hidden_dim": 24}
HEADS = {
    "full_attention_every": 2,
    "linear_key_heads": 2,
    "linear_value_heads": 6,
    "linear_key_dim": 8,
    "linear_value_dim": 7,
}
LINEAR = {"head_dim": 12, "partial_rotary_factor": 0.5, **HEADS}
CHANGES = {  # family -> changes of its debugmodel; the window crosses the shards of a sequence
    "qwen3": {**GROUPED, "head_dim": 12},
    "mistral": {**GROUPED, "window": 17},
    "gpt2": {**SMALL, "positions": 96},
    "olmo2": GROUPED,
    # the first of two blocks has a window, or RoPE, or its base; with RoPE, the gradient of the
    # biases of keys is not zero
    "olmo3": {**GROUPED, "window": 17, "full_attention_every": 2, "rope_scaling_factor": 8.0},
    "olmo_hybrid": {**GROUPED, **HEADS},
    "qwen2": GROUPED,
    "smollm3": {**GROUPED, "no_rope_every": 2},
    "gemma3": {**GROUPED, "head_dim": 12, "window": 17, "full_attention_every": 2},
    "mixtral": {**EXPERTS, "n_kv_heads": 2},
    "qwen3_moe": {**EXPERTS, "n_kv_heads": 2, "head_dim": 12},
    "qwen3_next": {
        **GROUPED,
        **EXPERTS,
        **LINEAR,
        "shared_hidden_dim": 20,
        "mtp_layers": 1,
    },
    "qwen3_5": {**GROUPED, **LINEAR},
    "qwen3_5_moe": {**EXPERTS, "n_kv_heads": 2, **LINEAR, "shared_hidden_dim": 20},
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
    "glm4_moe": {**GROUPED, **EXPERTS, "head_dim": 12, "n_expert_groups": 2},
    "gpt_oss": {**EXPERTS, "n_kv_heads": 2, "head_dim": 12, "window": 17},
}
UNPLANNED = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
)  # families that the planner refuses
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss")


def recipe_of(family: str, **changes) -> Recipe:
    """A short run of a small model."""
    sizes = replace(next(iter(FAMILIES[family].flavors.values())), **CHANGES[family])
    recipe = replace(SGD, steps=2, batch=12, lr=0.2, sizes=sizes)
    return replace(recipe, **changes)


def with_adapters(recipe: Recipe, targets: str = "*") -> Recipe:
    """The recipe with adapters; the first step of SGD makes B so large that A learns."""
    return replace(recipe, adapters=targets, lr=1.0 if recipe.optimizer == "SGD" else recipe.lr)


LINEAR_ATTENTION_ALONE = recipe_of("qwen3_5", steps=1)
LINEAR_ATTENTION_ALONE = replace(
    LINEAR_ATTENTION_ALONE, sizes=replace(LINEAR_ATTENTION_ALONE.sizes, n_layers=1)
)

# DeepSeek-V3 that predicts two further tokens
FURTHER_TOKENS = recipe_of(
    "deepseek_v3",
    documents=True,
    z_loss=0.01,
    balancing=LoadBalancing(0.1, 0.1, bias_update_rate=0.02),
)
FURTHER_TOKENS = replace(FURTHER_TOKENS, sizes=replace(FURTHER_TOKENS.sizes, mtp_layers=2))

MOE_EXPERTS = ExpertSizes(count=4, active=2, hidden_dim=24, shared_dim=16)
MOE_SIZES = MoESizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=88,
    vocab_size=509,
    rope_theta=1e4,
    experts=MOE_EXPERTS,
)
MOE = replace(SGD, sizes=MOE_SIZES, batch=12, seq_len=24, steps=2)


def with_router(experts: ExpertSizes, **changes) -> Recipe:
    """The recipe of experts with these ones."""
    return replace(MOE, **{"sizes": replace(MOE_SIZES, experts=experts), **changes})


# A token has one of 8 experts, and there are so few tokens that some ranks of experts get none.
SPARSE = with_router(ExpertSizes(8, active=1, hidden_dim=24, normalize=False), batch=4, seq_len=2)
SOFTMAX = with_router(
    ExpertSizes(count=6, active=2, hidden_dim=20, shared_dim=16),
    steps=3,
    balancing=LoadBalancing(aux_loss_coef=0.5, z_loss_coef=0.1),
)
# DeepSeek-V3's router; the bias moves so far in a step that it changes what is selected.
DEEPSEEK = ExpertSizes(8, active=3, hidden_dim=20, score="sigmoid", route_scale=2.5, groups=4)
SIGMOID = with_router(
    replace(DEEPSEEK, active_groups=2, selection_bias=True),
    steps=3,
    balancing=LoadBalancing(0.5, 0.1, bias_update_rate=0.02),
)
