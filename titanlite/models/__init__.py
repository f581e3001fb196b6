"""Plain single-device models and the facts about them; nothing here knows of other processes."""

from __future__ import annotations

from titanlite.models.attention import KeyValueCache
from titanlite.models.documents import document_positions
from titanlite.models.embedding import Embedding
from titanlite.models.family import Family, ModelConfig, matching
from titanlite.models.llama import LLAMA, Llama, LlamaShape
from titanlite.models.loss import IGNORED, LossConfig, Output, Vocabulary, valid_tokens

FAMILIES = {family.name: family for family in (LLAMA,)}

__all__ = [
    "FAMILIES",
    "IGNORED",
    "Embedding",
    "Family",
    "KeyValueCache",
    "Llama",
    "LlamaShape",
    "LossConfig",
    "ModelConfig",
    "Output",
    "Vocabulary",
    "document_positions",
    "matching",
    "valid_tokens",
]
