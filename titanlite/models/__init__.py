"""Single-device models and the facts about them, independent of distributed training."""

from __future__ import annotations

from typing import Any

from titanlite.models.config_json import HuggingFaceMapping
from titanlite.models.decoder import TokenEmbedding
from titanlite.models.deepseek_v3 import DEEPSEEK_V3
from titanlite.models.gemma3 import GEMMA3
from titanlite.models.glm4_moe import GLM4_MOE
from titanlite.models.gpt2 import GPT2_FAMILY
from titanlite.models.gpt_oss import GPT_OSS
from titanlite.models.llama import LLAMA2, LLAMA3, Llama, Llama3Sizes
from titanlite.models.loss import LossConfig, OutputLayer, Vocabulary, valid_tokens
from titanlite.models.mistral import MISTRAL
from titanlite.models.mixtral import MIXTRAL
from titanlite.models.moe import MixtureOfExperts
from titanlite.models.olmo2 import OLMO2
from titanlite.models.olmo3 import OLMO3
from titanlite.models.olmo_hybrid import OLMO_HYBRID
from titanlite.models.qwen2 import QWEN2
from titanlite.models.qwen3 import QWEN3
from titanlite.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from titanlite.models.qwen3_moe import QWEN3_MOE
from titanlite.models.qwen3_next import QWEN3_NEXT
from titanlite.models.router import ExpertSizes, LoadBalancing, Router
from titanlite.models.sizes import ModelSizes
from titanlite.models.smollm3 import SMOLLM3
from titanlite.models.spec import ModelConfig, ModelSpec, first_match

FAMILIES: dict[str, ModelSpec[Any]] = {  # values of model.name; add a family here
    spec.name: spec
    for spec in (
        LLAMA3,
        QWEN3,
        LLAMA2,
        MISTRAL,
        GPT2_FAMILY,
        OLMO2,
        OLMO3,
        OLMO_HYBRID,
        QWEN2,
        SMOLLM3,
        GEMMA3,
        MIXTRAL,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        DEEPSEEK_V3,
        GLM4_MOE,
        GPT_OSS,
    )
}

__all__ = [
    "FAMILIES",
    "LLAMA3",
    "ExpertSizes",
    "HuggingFaceMapping",
    "Llama",
    "Llama3Sizes",
    "LoadBalancing",
    "LossConfig",
    "MixtureOfExperts",
    "ModelConfig",
    "ModelSizes",
    "ModelSpec",
    "OutputLayer",
    "Router",
    "TokenEmbedding",
    "Vocabulary",
    "first_match",
    "valid_tokens",
]
