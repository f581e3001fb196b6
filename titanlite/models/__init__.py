"""Plain single-device models and the facts about them; nothing here knows of other processes."""

from __future__ import annotations

from titanlite.models.embedding import TokenEmbedding
from titanlite.models.llama3.model import LLAMA, Llama, Llama3Sizes
from titanlite.models.loss import LossConfig, OutputLayer, Vocabulary, valid_tokens
from titanlite.models.spec import ModelConfig, ModelSpec, first_match

FAMILIES = {spec.name: spec for spec in (LLAMA,)}

__all__ = [
    "FAMILIES",
    "LLAMA",
    "Llama",
    "Llama3Sizes",
    "LossConfig",
    "ModelConfig",
    "ModelSpec",
    "OutputLayer",
    "TokenEmbedding",
    "Vocabulary",
    "first_match",
    "valid_tokens",
]
