"""Llama 3 as Hugging Face's LlamaForCausalLM: parameter names, and config.json both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.errors import CheckpointError
from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama3.model import Llama3Sizes
from titanlite.models.rope import Llama3Scaling
from titanlite.models.spec import HuggingFaceMapping

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # the tensors are equal, without a permutation: rotary pairs are (i, i + K/2) in both
DERIVED = "*.rotary_emb.inv_freq"

LLAMA_CONFIG = ConfigFormat(
    family="llama3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    sizes=Llama3Sizes,
    keys={**HEAD_KEYS, "rope_scaling_factor": "factor"},
    fixed={**SAME_AS_LLAMA, "sliding_window": None},
    defaults={
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    rope_scaling={
        "rope_type": "llama3",
        "low_freq_factor": Llama3Scaling.low_frequency_factor,
        "high_freq_factor": Llama3Scaling.high_frequency_factor,
        "original_max_position_embeddings": Llama3Scaling.original_context,
    },
)


def write_llama_config(sizes: Llama3Sizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    if sizes.qk_norm:
        raise CheckpointError(
            "model.qk_norm = true: Hugging Face's LlamaForCausalLM has no such norm, and would"
            " compute something else from these weights."
        )
    scaling = None
    if sizes.rope_scaling is not None:
        scaling = {"factor": sizes.rope_scaling_factor, **LLAMA_CONFIG.rope_scaling}
        context = max(context, int(sizes.rope_scaling_factor * Llama3Scaling.original_context))
    config = LLAMA_CONFIG.write(sizes, max_position_embeddings=context, rope_scaling=scaling)
    del config["factor"]
    return config


def read_llama_config(config: Mapping[str, Any]) -> Llama3Sizes:
    """The sizes in a config.json; raises CheckpointError."""
    n_heads = config.get("num_attention_heads")
    stated = {key: value for key, value in config.items() if value is not None}
    return LLAMA_CONFIG.read({"num_key_value_heads": n_heads, **stated})


HUGGING_FACE = HuggingFaceMapping(
    architecture="LlamaForCausalLM",
    names=NAMES,
    derived=DERIVED,
    to_config=write_llama_config,
    from_config=read_llama_config,
)
