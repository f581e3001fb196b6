"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama's blocks, of which every fourth has no RoPE
(https://arxiv.org/abs/2501.18795)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import RopeSettings
from titanlite.models.llama import LLAMA3, NAMES, LlamaSizes, null_key_value_heads
from titanlite.settings import Range


@dataclass(frozen=True)
class SmolLM3Sizes(LlamaSizes):
    """The sizes of one SmolLM3 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 128_256
    rope_theta: size.RopeTheta = 50_000.0
    no_rope_every: Annotated[int, Range(0), "every n-th block has no RoPE; 0: all have it"] = 4
    tied_embeddings: size.TiedEmbeddings = True

    def rotary_of(self, block: int) -> RopeSettings | None:
        return None if size.is_every(self.no_rope_every, block) else super().rotary_of(block)


HUGGING_FACE = HuggingFaceMapping(
    family="smollm3",
    architecture="SmolLM3ForCausalLM",
    sizes=SmolLM3Sizes,
    names=NAMES,
    own_keys={"no_rope_every": "no_rope_layers"},
    fixed={**SAME_AS_LLAMA, "use_sliding_window": False, "head_dim": None},
    defaults={
        **COMMON_DEFAULTS,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layers": 4,
        "num_key_value_heads": 4,
    },
    implied=lambda config: {
        "no_rope_layers": config.get("no_rope_layer_interval"),
        **null_key_value_heads(config),
    },
    intervals={"no_rope_layers": (1, 0)},
)

FLAVORS = {
    "debugmodel": SmolLM3Sizes(256, 4, 8, 2, 768, vocab_size=2048),
    # config.json of https://huggingface.co/HuggingFaceTB/SmolLM3-3B-Base, whose context was
    # extended: pre-training had 4,096 tokens and a base of 50,000
    "3B": SmolLM3Sizes(2048, 36, 16, 4, 11_008),
    "3B-long": SmolLM3Sizes(2048, 36, 16, 4, 11_008, rope_theta=5_000_000.0),
}

SMOLLM3 = replace(LLAMA3, name="smollm3", flavors=FLAVORS, hugging_face=HUGGING_FACE)
