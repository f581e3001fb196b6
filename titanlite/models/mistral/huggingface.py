"""Mistral as Hugging Face's MistralForCausalLM: config.json both ways; Llama's parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.errors import CheckpointError
from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama3.huggingface import DERIVED, NAMES
from titanlite.models.mistral.model import MistralSizes
from titanlite.models.spec import HuggingFaceMapping

WINDOW_KEY = "sliding_window"
UNTIED_KEYS = {name: key for name, key in HEAD_KEYS.items() if name != "tied_embeddings"}

MISTRAL_CONFIG = ConfigFormat(
    family="mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    sizes=MistralSizes,
    keys={**UNTIED_KEYS, "window": WINDOW_KEY},
    fixed={**SAME_AS_LLAMA, "tie_word_embeddings": False},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        WINDOW_KEY: 4096,
    },
)


def write_mistral_config(sizes: MistralSizes, context: int) -> dict[str, Any]:
    """config.json; `context`: tokens per training sequence."""
    config = MISTRAL_CONFIG.write(sizes, max_position_embeddings=context)
    return {**config, WINDOW_KEY: sizes.window or None}


def read_mistral_config(config: Mapping[str, Any]) -> MistralSizes:
    """The sizes in a config.json; raises CheckpointError. Without a window, its value is null."""
    values = {**MISTRAL_CONFIG.defaults, **config}
    if values[WINDOW_KEY] is None:
        values[WINDOW_KEY] = 0
    elif values.get("layer_types"):
        # AutoModel then builds Ministral, which follows layer_types, and MistralForCausalLM ignores
        # them.
        raise CheckpointError(
            f"config.json has layer_types, and {WINDOW_KEY} = {values[WINDOW_KEY]!s:.80} for all"
            " layers: they may contradict each other.",
            fix=f"Set {WINDOW_KEY} = null if no layer has a window, or remove layer_types if all"
            " have one.",
        )
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values.get("num_attention_heads")
    return MISTRAL_CONFIG.read(values)


HUGGING_FACE = HuggingFaceMapping(
    architecture=MISTRAL_CONFIG.architecture,
    names=NAMES,
    derived=DERIVED,
    to_config=write_mistral_config,
    from_config=read_mistral_config,
)
