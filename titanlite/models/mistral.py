"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama's blocks with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any

from titanlite.errors import CheckpointError
from titanlite.models import sizes as size
from titanlite.models.config_json import HEAD_KEYS, SAME_AS_LLAMA, ConfigFormat
from titanlite.models.llama import DERIVED, LLAMA3, NAMES, LlamaSizes
from titanlite.settings import Range


@dataclass(frozen=True)
class MistralSizes(LlamaSizes):
    """The sizes of one Mistral model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 32_768
    head_dim: size.HeadDim = 0
    norm_eps: size.NormEps = 1e-5
    window: Annotated[int, Range(0), "tokens that a token attends to, itself too; 0: all"] = 0


# --- Hugging Face ---------------------------------------------------------------------------------

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


# --- the family -----------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": MistralSizes(256, 4, 8, 2, 768, vocab_size=2048, window=64),
    # https://arxiv.org/abs/2310.06825, table 1, and the config.json of
    # https://huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3
    "7B-v0.1": MistralSizes(
        4096, 32, 32, 8, 14_336, vocab_size=32_000, rope_theta=10_000.0, window=4096
    ),
    "7B-v0.3": MistralSizes(4096, 32, 32, 8, 14_336),
}

MISTRAL = replace(
    LLAMA3,
    name="mistral",
    flavors=FLAVORS,
    hugging_face=MISTRAL_CONFIG.mapping(NAMES, DERIVED, write_mistral_config, read_mistral_config),
)
