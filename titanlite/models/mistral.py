"""Mistral 7B (https://arxiv.org/abs/2310.06825): Llama's blocks with a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from titanlite.errors import CheckpointError
from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.llama import LLAMA3, NAMES, LlamaSizes


@dataclass(frozen=True)
class MistralSizes(LlamaSizes):
    """The sizes of one Mistral model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 32_768
    head_dim: size.HeadDim = 0
    norm_eps: size.NormEps = 1e-5
    window: size.Window = 0


WINDOW_KEY, WINDOW = "sliding_window", 4096  # transformers' default; null: no window


def implied_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key-value heads of a config.json that leaves them out.

    Raises CheckpointError for a window that `layer_types` may contradict.
    """
    window = config.get(WINDOW_KEY, WINDOW)
    if window is not None and config.get("layer_types"):
        # AutoModel then builds Ministral, which follows layer_types; MistralForCausalLM does not.
        raise CheckpointError(
            f"config.json has layer_types, and {WINDOW_KEY} = {window!s:.80} for all"
            " layers: they may contradict each other.",
            fix=f"Set {WINDOW_KEY} = null if no layer has a window, or remove layer_types if all"
            " have one.",
        )
    is_null = "num_key_value_heads" in config
    return {"num_key_value_heads": config.get("num_attention_heads") if is_null else 8}


HUGGING_FACE = HuggingFaceMapping(
    family="mistral",
    architecture="MistralForCausalLM",
    sizes=MistralSizes,
    names=NAMES,
    own_keys={"window": WINDOW_KEY},
    fixed={**SAME_AS_LLAMA, "tie_word_embeddings": False},
    defaults={**COMMON_DEFAULTS, "head_dim": 0, WINDOW_KEY: WINDOW},
    implied=implied_heads,
    null_is_zero=[WINDOW_KEY],
)

FLAVORS = {
    "debugmodel": MistralSizes(256, 4, 8, 2, 768, vocab_size=2048, window=64),
    # https://arxiv.org/abs/2310.06825, table 1, and the config.json of
    # https://huggingface.co/mistralai/Mistral-7B-v0.1 and -v0.3
    "7B-v0.1": MistralSizes(
        4096, 32, 32, 8, 14_336, vocab_size=32_000, rope_theta=10_000.0, window=4096
    ),
    "7B-v0.3": MistralSizes(4096, 32, 32, 8, 14_336),
}

MISTRAL = replace(LLAMA3, name="mistral", flavors=FLAVORS, hugging_face=HUGGING_FACE)
