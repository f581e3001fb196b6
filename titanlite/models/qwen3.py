"""Qwen3's dense models (https://arxiv.org/abs/2505.09388): Llama's blocks with a norm on each
query and key head, and heads whose width does not follow from the model's."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.llama import LLAMA3, NAMES, LlamaSizes
from titanlite.settings import Range


@dataclass(frozen=True)
class Qwen3Sizes(LlamaSizes):
    """The sizes of one Qwen3 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 151_936
    head_dim: Annotated[int, Range(1), "elements per head"] = 128
    tied_embeddings: size.TiedEmbeddings = False

    qk_norm = True


HUGGING_FACE = HuggingFaceMapping(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    sizes=Qwen3Sizes,
    names=NAMES,
    fixed={**SAME_AS_LLAMA, "use_sliding_window": False},
    defaults={**COMMON_DEFAULTS, "head_dim": 128},
)

FLAVORS = {
    "debugmodel": Qwen3Sizes(256, 8, 16, 8, 3072, vocab_size=2048, tied_embeddings=True),
    # https://arxiv.org/abs/2505.09388, table 1; widths from the models' config.json, such as
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "0.6B": Qwen3Sizes(1024, 28, 16, 8, 3072, tied_embeddings=True),
    "1.7B": Qwen3Sizes(2048, 28, 16, 8, 6144, tied_embeddings=True),
    "4B": Qwen3Sizes(2560, 36, 32, 8, 9728, tied_embeddings=True),
    "8B": Qwen3Sizes(4096, 36, 32, 8, 12_288),
    "14B": Qwen3Sizes(5120, 40, 40, 8, 17_408),
    "32B": Qwen3Sizes(5120, 64, 64, 8, 25_600),
}

QWEN3 = replace(
    LLAMA3,
    name="qwen3",
    flavors=FLAVORS,
    flavor_hints=dict.fromkeys(  # torchtitan has them in one family
        ("debugmodel_moe", "30B-A3B", "235B-A22B"),
        'Set model.name = "qwen3_moe": this flavor has experts.',
    ),
    hugging_face=HUGGING_FACE,
)
