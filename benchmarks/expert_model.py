"""A small model with experts for the measurements of `benchmarks.experts`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanlite.models import LLAMA3, ExpertSizes, Llama3Sizes
from titanlite.models.spec import ModelSpec

FEW_EXPERTS = ExpertSizes(count=16, active=2, hidden_dim=64)


@dataclass(frozen=True)
class ExpertLlamaSizes(Llama3Sizes):
    """Sizes of a Llama with experts in every block; with `qk_norm` it is Qwen3's with experts."""

    experts: ExpertSizes = FEW_EXPERTS


EXPERT_LLAMA: ModelSpec[ExpertLlamaSizes] = replace(
    LLAMA3,
    name="expert_llama",
)
