"""Llama 3 as Hugging Face's LlamaForCausalLM: parameter names, and config.json both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from titanlite.errors import CheckpointError
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

CONFIG_KEYS = {  # field of Llama3Sizes -> key of config.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "rope_scaling_factor": "factor",
    "tied_embeddings": "tie_word_embeddings",
}

FIXED_VALUES = {  # other keys that would change the results, and the only value that we implement
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "auto_map": None,  # model code inside the folder
}

ROPE_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": Llama3Scaling.low_frequency_factor,
    "high_freq_factor": Llama3Scaling.high_frequency_factor,
    "original_max_position_embeddings": Llama3Scaling.original_context,
}


def to_config(sizes: Llama3Sizes, context: int) -> dict[str, Any]:
    """config.json with the keys of transformers 4, which transformers 5 reads too.

    `context`: tokens per training sequence.
    """
    if sizes.qk_norm:
        raise CheckpointError(
            "model.qk_norm = true: Hugging Face's LlamaForCausalLM has no such norm, and would"
            " compute something else from these weights."
        )
    config = {key: getattr(sizes, field) for field, key in CONFIG_KEYS.items()}
    factor, is_scaled = config.pop("factor"), sizes.rope_scaling is not None
    scaled_context = int(factor * Llama3Scaling.original_context) if is_scaled else 0
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config,
        **{key: value for key, value in FIXED_VALUES.items() if value in ("silu", False)},
        "head_dim": sizes.head_width,
        "max_position_embeddings": max(context, scaled_context),
        "rope_scaling": {"factor": factor, **ROPE_SCALING} if is_scaled else None,
    }


def from_config(config: Mapping[str, Any]) -> Llama3Sizes:
    """The sizes in a config.json of transformers 4 or 5.

    Missing keys have LlamaConfig's defaults, except the sizes that every model chooses: `dim`,
    `n_layers`, `n_heads`, `hidden_dim` and `vocab_size` are required. Raises a CheckpointError that
    lists every key whose value is missing, not implemented by this model or contradicts others.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    # transformers 5 also prefers rope_scaling
    rope = stated.get("rope_scaling") or stated.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"rope_scaling": rope}
    values = {
        "num_key_value_heads": stated.get("num_attention_heads"),
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_type": rope.get("type", "default"),
        "tie_word_embeddings": False,
        **stated,
        **rope,
    }
    is_scaled = values["rope_type"] == "llama3"
    values["factor"] = rope.get("factor") if is_scaled else 1.0
    required = FIXED_VALUES | (ROPE_SCALING if is_scaled else {"rope_type": "default"})
    sizes: dict[str, Any] = {field: values.get(key) for field, key in CONFIG_KEYS.items()}
    wrong = [
        *(key for key in required if values.get(key, FIXED_VALUES.get(key)) != required[key]),
        *(rope.keys() - ROPE_SCALING.keys() - {"type", "rope_theta", "factor"}),
        *(key for key in stated.keys() & rope.keys() if stated[key] != rope[key]),
        *(CONFIG_KEYS[field] for field, value in sizes.items() if not _is_valid(field, value)),
    ]
    wrong = wrong or _inconsistent_heads(sizes)
    if wrong:
        raise _unsupported(wrong, values, required)
    if sizes["head_dim"] * sizes["n_heads"] == sizes["dim"]:
        sizes["head_dim"] = 0  # the flavors leave it out too, so that equal models compare equal
    return Llama3Sizes(**sizes)


def _is_valid(field: str, value: Any) -> bool:
    """Whether a value has the type of a field of Llama3Sizes and lies in its range."""
    kind: type = type(getattr(Llama3Sizes, field, 1))  # fields without a default are int
    if kind is bool or isinstance(value, bool):
        return type(value) is kind
    lowest = 0 if field in ("head_dim", "norm_eps") else 1
    if not isinstance(value, int | float) or not isinstance(value, int | kind):
        return False
    return lowest <= value <= 1 << 40  # JSON integers have no upper limit


def _inconsistent_heads(sizes: Mapping[str, Any]) -> list[str]:
    """Keys of config.json whose values do not fit together."""
    n_heads, head_width = sizes["n_heads"], sizes["head_dim"] or sizes["dim"] / sizes["n_heads"]
    wrong = []
    if n_heads % sizes["n_kv_heads"]:
        wrong += ["num_attention_heads", "num_key_value_heads"]
    if head_width % 2:  # not an integer, or odd: rotary embedding rotates pairs
        wrong += ["head_dim"] if sizes["head_dim"] else ["hidden_size", "num_attention_heads"]
    return wrong


def _unsupported(
    keys: list[str], values: Mapping[str, Any], required: Mapping[str, Any]
) -> CheckpointError:
    supported = {
        key: f" (only {json.dumps(value)} is supported)" for key, value in required.items()
    }
    shown = {key: f"{key} = {json.dumps(values.get(key)):.80}" for key in keys}  # each key once
    problems = ", ".join(text + supported.get(key, "") for key, text in shown.items())
    return CheckpointError(
        f"config.json describes a model that llama3 does not support: {problems}."
    )


HUGGING_FACE = HuggingFaceMapping(
    architecture="LlamaForCausalLM",
    names=NAMES,
    derived="*.rotary_emb.inv_freq",
    to_config=to_config,
    from_config=from_config,
)
