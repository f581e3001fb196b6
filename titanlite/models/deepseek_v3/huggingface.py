"""DeepSeek-V3 as Hugging Face's DeepseekV3ForCausalLM: names, and config.json both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.deepseek_v3.model import DeepSeekV3Sizes
from titanlite.models.rope import YarnScaling
from titanlite.models.spec import HuggingFaceMapping

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.router.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.{expert}.gate_proj.weight",
    "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.{expert}.up_proj.weight",
    "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.{expert}.down_proj.weight",
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # the rotated features are in the published order: pairs are (2i, 2i + 1)

OWN_KEYS = {
    "n_dense_layers": "first_k_dense_replace",
    "n_experts": "n_routed_experts",
    "n_active_experts": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "n_expert_groups": "n_group",
    "n_active_groups": "topk_group",
    "route_scale": "routed_scaling_factor",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rope_scaling_factor": "factor",
}
NOT_OURS = ("n_kv_heads", "head_dim", "tied_embeddings")
KEYS = {name: key for name, key in HEAD_KEYS.items() if name not in NOT_OURS} | OWN_KEYS

FIXED_VALUES = {
    **SAME_AS_LLAMA,
    "tie_word_embeddings": False,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}

FORMAT = ConfigFormat(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    sizes=DeepSeekV3Sizes,
    keys=KEYS,
    fixed=FIXED_VALUES,
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "norm_topk_prob": True},
    rope_scaling={
        "rope_type": "yarn",
        "beta_fast": YarnScaling.fast_turns,
        "beta_slow": YarnScaling.slow_turns,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": YarnScaling.original_context,
    },
    has_head_width=False,
)


def to_config(sizes: DeepSeekV3Sizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    config = FORMAT.for_experts(sizes.n_active_experts).write(sizes)
    factor, scaling = config.pop("factor"), sizes.rope_scaling
    scaled_context = int(factor * scaling.original_context) if scaling else 0
    return {
        **config,
        "q_lora_rank": sizes.q_lora_rank or None,
        "num_key_value_heads": sizes.n_heads,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": max(context, scaled_context),
        "rope_scaling": {"factor": factor, **FORMAT.rope_scaling} if scaling else None,
    }


def from_config(config: Mapping[str, Any]) -> DeepSeekV3Sizes:
    """Inverse of `to_config`; raises CheckpointError."""
    if "q_lora_rank" in config:  # null: queries are projected from the hidden states
        config = {**config, "q_lora_rank": config["q_lora_rank"] or 0}
    return FORMAT.for_experts(config.get("num_experts_per_tok")).read(config)


HUGGING_FACE = HuggingFaceMapping(
    architecture="DeepseekV3ForCausalLM",
    names=NAMES,
    derived="model.layers.61.*",  # the block for multi-token prediction of the published model
    to_config=to_config,
    from_config=from_config,
)
