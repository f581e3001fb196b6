"""OLMo 3 (https://arxiv.org/abs/2512.13961): OLMo 2's blocks, of which three of four have a sliding
window; YaRN extends the context of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any

from titanlite.errors import CheckpointError
from titanlite.models import sizes as size
from titanlite.models.config_json import (
    COMMON_DEFAULTS,
    LOCAL_ROPE_THETA,
    SAME_AS_LLAMA,
    HuggingFaceMapping,
    rope_table,
)
from titanlite.models.decoder import RopeSettings
from titanlite.models.llama import default_key_value_heads
from titanlite.models.olmo2 import NAMES, OLMO2, Olmo2Sizes
from titanlite.models.rope import YarnScaling, yarn_factor
from titanlite.settings import Range

TRAINED_CONTEXT = 8192  # tokens, before YaRN extended it


@dataclass(frozen=True)
class Olmo3Sizes(Olmo2Sizes):
    """The sizes of one OLMo 3 model: its keys of [model]."""

    _: KW_ONLY
    vocab_size: size.VocabSize = 100_278
    window: size.OwnWindow = 4096
    full_attention_every: size.FullAttentionEvery = 4
    rope_scaling_factor: Annotated[
        float, Range(1), "of YaRN in blocks without a window; 1: none"
    ] = 1.0

    @property
    def rope_scaling(self) -> YarnScaling | None:
        if (factor := self.rope_scaling_factor) == 1:
            return None
        rotary = yarn_factor(factor)
        return YarnScaling(factor, original_context=TRAINED_CONTEXT, rotary_factor=rotary)

    def rotary_of(self, block: int) -> RopeSettings | None:
        scaling = None if self.window_of(block) else self.rope_scaling
        return self.head_width, self.rope_theta, scaling


ROPE_THETA = 500_000.0  # transformers' default


def implied_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key-value heads of a config.json that leaves them out.

    Raises CheckpointError if blocks with a window have another base of RoPE: transformers 5 gives
    them its default where the base is stated for all blocks together.
    """
    rope = {"rope_theta": config.get("rope_theta", ROPE_THETA), **rope_table(config)}
    local = rope.get(LOCAL_ROPE_THETA, ROPE_THETA)
    if local != rope["rope_theta"]:
        raise CheckpointError(
            f"config.json has rope_theta = {rope['rope_theta']!s:.80}, and for blocks with a window"
            f" {local!s:.80}: olmo3 has one for all blocks.",
            fix="State the base for both kinds of blocks in rope_parameters.",
        )
    return default_key_value_heads(config)


def nested_rope(sizes: Olmo3Sizes) -> dict[str, Any]:
    """The base for both kinds of blocks, which transformers 5 would not take from rope_theta."""
    kinds = ("full_attention", "sliding_attention")
    plain = {"rope_type": "default", "rope_theta": sizes.rope_theta}
    return {"rope_parameters": dict.fromkeys(kinds, plain)}


HUGGING_FACE = HuggingFaceMapping(
    family="olmo3",
    architecture="Olmo3ForCausalLM",
    sizes=Olmo3Sizes,
    names=NAMES,
    own_keys={"window": "sliding_window", "full_attention_every": "layer_types"},
    fixed={**SAME_AS_LLAMA, "head_dim": None, "clip_qkv": None},
    defaults={
        **COMMON_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE_THETA,
        LOCAL_ROPE_THETA: ROPE_THETA,
        "layer_types": 4,
        "beta_fast": YarnScaling.fast_turns,
        "beta_slow": YarnScaling.slow_turns,
    },
    implied=implied_values,
    further=nested_rope,
    rope_scaling={
        "rope_type": "yarn",
        "beta_fast": YarnScaling.fast_turns,
        "beta_slow": YarnScaling.slow_turns,
        "original_max_position_embeddings": TRAINED_CONTEXT,
    },
    intervals={"layer_types": ("sliding_attention", "full_attention")},
)

FLAVORS = {
    "debugmodel": Olmo3Sizes(256, 4, 8, 4, 768, vocab_size=2048, window=64),
    # https://huggingface.co/allenai/Olmo-3-1025-7B and -1125-32B, before YaRN with a factor of 8
    "7B": Olmo3Sizes(4096, 32, 32, 32, 11_008),
    "32B": Olmo3Sizes(5120, 64, 40, 8, 27_648),
}

OLMO3 = replace(OLMO2, name="olmo3", flavors=FLAVORS, hugging_face=HUGGING_FACE)
