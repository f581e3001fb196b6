"""Qwen2.5's dense models (https://arxiv.org/abs/2412.15115): Llama's blocks with biases of queries,
keys and values. Those of Qwen2 are the same in other sizes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, HuggingFaceMapping
from titanlite.models.llama import LLAMA3, NAMES, LlamaSizes, null_key_value_heads


@dataclass(frozen=True)
class Qwen2Sizes(LlamaSizes):
    """The sizes of one Qwen2.5 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 152_064
    tied_embeddings: size.TiedEmbeddings = False

    qkv_bias = True


HUGGING_FACE = HuggingFaceMapping(
    family="qwen2",
    architecture="Qwen2ForCausalLM",
    sizes=Qwen2Sizes,
    names=NAMES,
    fixed={"hidden_act": "silu", "use_sliding_window": False, "head_dim": None},
    defaults={**COMMON_DEFAULTS, "num_key_value_heads": 32},
    implied=null_key_value_heads,
)

FLAVORS = {
    "debugmodel": Qwen2Sizes(256, 4, 8, 2, 768, vocab_size=2048, tied_embeddings=True),
    # https://arxiv.org/abs/2412.15115, table 1; widths and epsilons from the config.json of the
    # base models, such as https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json
    "0.5B": Qwen2Sizes(896, 24, 14, 2, 4864, vocab_size=151_936, tied_embeddings=True),
    "1.5B": Qwen2Sizes(1536, 28, 12, 2, 8960, vocab_size=151_936, tied_embeddings=True),
    "3B": Qwen2Sizes(2048, 36, 16, 2, 11_008, vocab_size=151_936, tied_embeddings=True),
    "7B": Qwen2Sizes(3584, 28, 28, 4, 18_944),
    "14B": Qwen2Sizes(5120, 48, 40, 8, 13_824, norm_eps=1e-5),
    "32B": Qwen2Sizes(5120, 64, 40, 8, 27_648, norm_eps=1e-5),
    "72B": Qwen2Sizes(8192, 80, 64, 8, 29_568, norm_eps=1e-5),
}

QWEN2 = replace(LLAMA3, name="qwen2", flavors=FLAVORS, hugging_face=HUGGING_FACE)
