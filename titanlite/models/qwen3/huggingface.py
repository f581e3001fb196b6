"""Qwen3 as Hugging Face's Qwen3ForCausalLM: parameter names, and config.json both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama3.huggingface import DERIVED
from titanlite.models.llama3.huggingface import NAMES as LLAMA_NAMES
from titanlite.models.qwen3.model import Qwen3Sizes
from titanlite.models.spec import HuggingFaceMapping

NORM_NAMES = {
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
NAMES = {**LLAMA_NAMES, **NORM_NAMES}

QWEN3_CONFIG = ConfigFormat(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    sizes=Qwen3Sizes,
    keys=HEAD_KEYS,
    fixed={**SAME_AS_LLAMA, "use_sliding_window": False},
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
)


def write_qwen3_config(sizes: Qwen3Sizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    return QWEN3_CONFIG.write(sizes, max_position_embeddings=context)


def read_qwen3_config(config: Mapping[str, Any]) -> Qwen3Sizes:
    """The sizes in a config.json; raises CheckpointError."""
    return QWEN3_CONFIG.read(config)


HUGGING_FACE = HuggingFaceMapping(
    architecture=QWEN3_CONFIG.architecture,
    names=NAMES,
    derived=DERIVED,
    to_config=write_qwen3_config,
    from_config=read_qwen3_config,
)
