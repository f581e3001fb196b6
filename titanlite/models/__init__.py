"""Single-device models and the facts about them, independent of distributed training."""

from __future__ import annotations

from typing import Any

from titanlite.models.embedding import TokenEmbedding
from titanlite.models.llama3.model import Llama, Llama3Sizes
from titanlite.models.llama3.spec import LLAMA3
from titanlite.models.loss import LossConfig, OutputLayer, Vocabulary, valid_tokens
from titanlite.models.shape import Experts, LatentAttention, ModelShape
from titanlite.models.spec import (
    HuggingFaceMapping,
    ModelConfig,
    ModelSizes,
    ModelSpec,
    first_match,
)

FAMILIES: dict[str, ModelSpec[Any]] = {  # values of model.name; a new family is one line here
    LLAMA3.name: LLAMA3,
}

__all__ = [
    "FAMILIES",
    "LLAMA3",
    "Experts",
    "HuggingFaceMapping",
    "LatentAttention",
    "Llama",
    "Llama3Sizes",
    "LossConfig",
    "ModelConfig",
    "ModelShape",
    "ModelSizes",
    "ModelSpec",
    "OutputLayer",
    "TokenEmbedding",
    "Vocabulary",
    "first_match",
    "valid_tokens",
]
