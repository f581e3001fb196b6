"""A small model with experts for the measurements of `benchmarks.experts`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from titanlite.models import LLAMA3, ExpertSizes, Llama, Llama3Sizes, MixtureOfExperts
from titanlite.models.llama import TransformerBlock
from titanlite.models.spec import ModelSpec

FEW_EXPERTS = ExpertSizes(count=16, active=2, hidden_dim=64)


@dataclass(frozen=True)
class ExpertLlamaSizes(Llama3Sizes):
    """Sizes of a Llama with experts."""

    experts: ExpertSizes = FEW_EXPERTS


class ExpertLlamaBlock(TransformerBlock):
    """Llama's block with experts."""

    def __init__(self, sizes: ExpertLlamaSizes):
        super().__init__(sizes)
        del self.feed_forward
        self.moe = MixtureOfExperts(sizes.dim, sizes.experts)

    def forward(self, x: Tensor, rope: Any, documents: Any = None, cache: Any = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, documents, cache)
        return x + self.moe(self.ffn_norm(x))


class ExpertLlama(Llama):
    """Llama with experts in every block; with `qk_norm` it is Qwen3's model with experts."""

    def __init__(self, sizes: ExpertLlamaSizes):
        super().__init__(sizes)
        for name in self.layers:
            self.layers[name] = ExpertLlamaBlock(sizes)


EXPERT_LLAMA: ModelSpec[ExpertLlamaSizes] = replace(
    LLAMA3,
    name="expert_llama",
    build=ExpertLlama,
    init_roles={"*.experts.w2": "residual", **LLAMA3.init_roles},
    experts=lambda sizes: sizes.experts,
)
