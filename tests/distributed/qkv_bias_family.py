"""A small family with biases on queries, keys and values only, as Qwen2; otherwise Llama."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titanlite.models import LLAMA3, Llama3Sizes
from titanlite.models.spec import ModelSpec


@dataclass(frozen=True)
class QkvBiasSizes(Llama3Sizes):
    """Sizes of a Llama with biases on queries, keys and values."""

    qkv_bias = True


QKV_BIAS_FAMILY: ModelSpec[QkvBiasSizes] = replace(
    LLAMA3,
    name="qkv_bias",
    flavors={"mini": QkvBiasSizes(32, 2, 4, 2, 88, vocab_size=509, rope_theta=1e4)},
    # random biases: those of zeros would hide a bias that a layout shards wrongly
    init_roles={"*.w[qkv].bias": "normal", **LLAMA3.init_roles},
)
