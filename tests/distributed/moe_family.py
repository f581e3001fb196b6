"""A small family with a mixture of experts: Llama, whose blocks but the first have experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanlite.models import LLAMA3, ExpertSizes, Llama, Llama3Sizes
from titanlite.models.llama import Attention, TransformerBlock
from titanlite.models.spec import ModelSpec

EXPERTS = ExpertSizes(count=4, active=2, hidden_dim=24)


@dataclass(frozen=True)
class MoESizes(Llama3Sizes):
    """Sizes of a Llama with experts."""

    experts: ExpertSizes = EXPERTS


class MoELlama(Llama):
    """Llama with experts in all blocks but the first."""

    def __init__(self, sizes: MoESizes):
        super().__init__(sizes)
        self.layers["0"] = TransformerBlock(sizes, Attention(sizes, 0))


MOE_FAMILY: ModelSpec[MoESizes] = replace(
    LLAMA3,
    name="moe",
    flavors={"mini": MoESizes(32, 3, 4, 2, 88, vocab_size=509, rope_theta=1e4)},
    build=MoELlama,
)
