"""OLMo Hybrid (https://huggingface.co/allenai/Olmo-Hybrid-7B): three blocks of linear attention,
Gated DeltaNet with strengths up to 2, then one block of OLMo 2, without RoPE as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn

from titanlite.models import sizes as size
from titanlite.models.config_json import (
    COMMON_DEFAULTS,
    SAME_AS_LLAMA,
    HuggingFaceMapping,
    StoredPart,
    rope_table,
)
from titanlite.models.decoder import CosSin, Decoder, FeedForward, RopeSettings
from titanlite.models.llama import default_key_value_heads
from titanlite.models.olmo2 import NAMES as OLMO2_NAMES
from titanlite.models.olmo2 import OLMO2, Olmo2Block, Olmo2Sizes
from titanlite.models.qwen3_5 import QWEN3_5, SplitDeltaNet
from titanlite.models.qwen3_next import (
    QWEN3_NEXT,
    SMALL,
    KeyDim,
    KeyHeads,
    LinearAttentionSizes,
    ValueDim,
    ValueHeads,
    check_linear_heads,
)
from titanlite.settings import Range

OUT_NORM_EPS = 1e-5  # of linear attention, whatever that of the other norms is


@dataclass(frozen=True)
class OlmoHybridSizes(LinearAttentionSizes, Olmo2Sizes):
    """The sizes of one model: its keys of [model]."""

    _: KW_ONLY
    linear_key_heads: KeyHeads = 30
    linear_value_heads: ValueHeads = 30
    linear_key_dim: KeyDim = 96
    linear_value_dim: ValueDim = 192
    rope_theta: Annotated[float, Range(0), "base of the RoPE frequencies; 0: no RoPE"] = 0.0
    negative_eigenvalues: Annotated[bool, "linear attention's strengths are up to 2, not 1"] = True

    def rotary_of(self, block: int) -> RopeSettings | None:
        is_full = size.is_every(self.full_attention_every, block)
        return super().rotary_of(block) if is_full and self.rope_theta else None


class LinearBlock(nn.Module):
    """Linear attention and feed-forward, each after an RMSNorm and added to the residual stream.

    Its norms come before its layers, those of the other blocks after: so the names differ.
    """

    def __init__(self, sizes: OlmoHybridSizes):
        super().__init__()
        self.input_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        strength = 2.0 if sizes.negative_eigenvalues else 1.0
        self.attention = SplitDeltaNet(sizes, OUT_NORM_EPS, strength)
        self.middle_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes.dim, sizes.hidden_dim)

    def forward(self, x: Tensor, rope: CosSin | None, *context: Any) -> Tensor:
        x = x + self.attention(self.input_norm(x), rope, *context)
        return x + self.feed_forward(self.middle_norm(x))


class OlmoHybrid(Decoder):
    """The transformer of OLMo Hybrid."""

    def __init__(self, sizes: OlmoHybridSizes):
        def build_block(index: int) -> nn.Module:
            is_full = size.is_every(sizes.full_attention_every, index)
            return Olmo2Block(sizes, index) if is_full else LinearBlock(sizes)

        super().__init__(sizes, build_block, sizes.rotary_of)


# --- Hugging Face ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OlmoHybridMapping(HuggingFaceMapping[OlmoHybridSizes]):
    """config.json of OLMo Hybrid, which has no RoPE if its base is null."""

    def from_config(self, config: Mapping[str, Any]) -> OlmoHybridSizes:
        if rope_table(config).get("rope_theta", 0) is None:
            config = {**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": None}
        return super().from_config(config)


NEXT = QWEN3_NEXT.hugging_face
LINEAR_NAMES = {  # of ours in linear attention -> there
    **{f"convolve.{part}": f"{part}_conv1d.weight" for part in "qkv"},
    **{f"w_{part}.weight": f"{part}_proj.weight" for part in "qkv"},
    "w_gate.weight": "g_proj.weight",
    "w_strength.weight": "b_proj.weight",
    "w_decay.weight": "a_proj.weight",
    "decay.A_log": "A_log",
    "decay.dt_bias": "dt_bias",
    "out_norm.weight": "o_norm.weight",
    "w_out.weight": "o_proj.weight",
}

HUGGING_FACE = OlmoHybridMapping(
    family="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    sizes=OlmoHybridSizes,
    names={
        **OLMO2_NAMES,
        "layers.*.input_norm.weight": "model.layers.*.input_layernorm.weight",
        "layers.*.middle_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        **{
            f"layers.*.attention.{ours}": f"model.layers.*.linear_attn.{theirs}"
            for ours, theirs in LINEAR_NAMES.items()
        },
    },
    parts={f"layers.*.attention.convolve.{x}": StoredPart(unit_columns=True) for x in "qkv"},
    own_keys={**NEXT.own_keys, "negative_eigenvalues": "linear_allow_neg_eigval"},
    fixed={**SAME_AS_LLAMA, "head_dim": None},
    defaults={**COMMON_DEFAULTS, "layer_types": 4, "linear_allow_neg_eigval": True},
    implied=default_key_value_heads,
    null_is_zero=["rope_theta"],
    # as published: of null, transformers takes its default
    further=lambda sizes: {"rope_parameters": {"rope_theta": sizes.rope_theta or None}},
    intervals=NEXT.intervals,
)


# --- the family -----------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": OlmoHybridSizes(256, 4, 8, 4, 768, vocab_size=2048, **SMALL),
    # https://huggingface.co/allenai/Olmo-Hybrid-7B/blob/main/config.json
    "7B": OlmoHybridSizes(3840, 32, 30, 30, 11_008),
}

OLMO_HYBRID = replace(
    QWEN3_NEXT,
    name="olmo_hybrid",
    flavors=FLAVORS,
    build=OlmoHybrid,
    tp_plan={
        **QWEN3_5.tp_plan,
        **OLMO2.tp_plan,
        "layers.*.input_norm": "sequence",
        "layers.*.middle_norm": "sequence",
    },
    init_roles={**QWEN3_NEXT.init_roles, "*norm.weight": "ones"},
    hugging_face=HUGGING_FACE,
    check_sizes=check_linear_heads,
    load_balancing=OLMO2.load_balancing,
)
