"""OLMo 2 as Hugging Face's Olmo2ForCausalLM: parameter names, and config.json both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama3.huggingface import DERIVED
from titanlite.models.olmo2.model import Olmo2Sizes
from titanlite.models.qwen3.huggingface import NAMES as QWEN3_NAMES
from titanlite.models.spec import HuggingFaceMapping

NAMES = {
    **QWEN3_NAMES,
    "layers.*.attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}
OLMO2_KEYS = {name: key for name, key in HEAD_KEYS.items() if name != "head_dim"}

OLMO2_CONFIG = ConfigFormat(
    family="olmo2",
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    sizes=Olmo2Sizes,
    keys=OLMO2_KEYS,
    fixed={**SAME_AS_LLAMA, "sliding_window": None, "head_dim": None, "clip_qkv": None},
    defaults={
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
)


def write_olmo2_config(sizes: Olmo2Sizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    return OLMO2_CONFIG.write(sizes, max_position_embeddings=context)


def read_olmo2_config(config: Mapping[str, Any]) -> Olmo2Sizes:
    """The sizes in a config.json; raises CheckpointError."""
    stated = {key: value for key, value in config.items() if value is not None}
    return OLMO2_CONFIG.read({"num_key_value_heads": config.get("num_attention_heads"), **stated})


HUGGING_FACE = HuggingFaceMapping(
    architecture=OLMO2_CONFIG.architecture,
    names=NAMES,
    derived=DERIVED,
    to_config=write_olmo2_config,
    from_config=read_olmo2_config,
)
