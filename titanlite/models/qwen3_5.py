"""Qwen3.5 (https://huggingface.co/Qwen/Qwen3.5-35B-A3B), text only: Qwen3-Next's blocks with
separate projections of linear attention, dense or with experts.

Published folders also have a vision encoder, which is not read, and a block for multi-token
prediction, which dense models can read. Its names, and the order of its inputs, are those that
vLLM's qwen3_5_mtp.py reads; transformers does not. Their RoPE has sections for the three
coordinates of an image; text has the same position in all of them, which is RoPE without sections.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any

from torch import Tensor, nn

from titanlite.models import sizes as size
from titanlite.models.config_json import SAME_AS_LLAMA, StoredPart
from titanlite.models.mtp import OnePredictionLayer, with_prediction_names
from titanlite.models.qwen3_next import (
    DEBUG,
    DEBUG_EXPERTS,
    MTP_NAMES,
    QWEN3_NEXT,
    DeltaNet,
    HybridSizes,
    Qwen3Next,
    SharedHidden,
)
from titanlite.models.qwen3_next import NAMES as NEXT_NAMES
from titanlite.settings import Range


@dataclass(frozen=True)
class Qwen35Sizes(HybridSizes):
    """The sizes of one dense model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 248_320
    mtp_layers: OnePredictionLayer = 0  # published: 1


@dataclass(frozen=True)
class Qwen35MoESizes(HybridSizes):
    """The sizes of one model with experts: its keys of [model]."""

    _: KW_ONLY
    n_experts: size.Experts = 256
    n_active_experts: Annotated[int, Range(2), "routed experts that compute a token"] = 8
    expert_hidden_dim: size.ExpertHiddenDim = 512
    shared_hidden_dim: SharedHidden = 512
    vocab_size: size.VocabSize = 248_320

    @property
    def hidden_dim(self) -> int:
        """Width of a feed-forward layer: of an expert."""
        return self.expert_hidden_dim


class SplitDeltaNet(DeltaNet):
    """Linear attention with a projection for each input of the delta rule."""

    def __init__(self, sizes: Any, norm_eps: float, max_strength: float = 1.0):
        super().__init__(sizes, norm_eps, max_strength)
        keys = sizes.linear_key_heads * self.key_dim
        values = sizes.linear_value_heads * self.value_dim
        self.w_q = nn.Linear(sizes.dim, keys, bias=False)
        self.w_k = nn.Linear(sizes.dim, keys, bias=False)
        self.w_v = nn.Linear(sizes.dim, values, bias=False)
        self.w_gate = nn.Linear(sizes.dim, values, bias=False)
        self.w_strength = nn.Linear(sizes.dim, sizes.linear_value_heads, bias=False)
        self.w_decay = nn.Linear(sizes.dim, sizes.linear_value_heads, bias=False)

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        qkv = [self.w_q(x), self.w_k(x), self.w_v(x)]
        return qkv, self.w_gate(x), self.w_strength(x), self.w_decay(x)


# --- Hugging Face ---------------------------------------------------------------------------------

PROJECTIONS = {  # in the order in which those of one tensor are concatenated
    "w_q": "in_proj_qkv",
    "w_k": "in_proj_qkv",
    "w_v": "in_proj_qkv",
    "w_gate": "in_proj_z",
    "w_strength": "in_proj_b",
    "w_decay": "in_proj_a",
}
NAMES = {
    f"layers.*.attention.{ours}.weight": f"model.layers.*.linear_attn.{theirs}.weight"
    for ours, theirs in PROJECTIONS.items()
}
ALL_NAMES = {**NEXT_NAMES, **NAMES}
NEXT = QWEN3_NEXT.hugging_face

HUGGING_FACE = replace(
    NEXT,
    family="qwen3_5",
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    multimodal="Qwen3_5ForConditionalGeneration",
    sizes=Qwen35Sizes,
    names=with_prediction_names(ALL_NAMES, "mtp.layers.0.", MTP_NAMES),
    parts={**NEXT.parts, **{name: StoredPart(index=i) for i, name in enumerate(NAMES)}},
    derived=["mtp.*", "model.visual.*"],
    fixed={
        "hidden_act": SAME_AS_LLAMA["hidden_act"],
        "attention_bias": SAME_AS_LLAMA["attention_bias"],
        "attn_output_gate": True,
    },
    defaults={**NEXT.defaults, "attn_output_gate": True},
    ignored_rope=["mrope_section", "mrope_interleaved"],
)
MOE_HUGGING_FACE = replace(
    HUGGING_FACE,
    family="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    multimodal="Qwen3_5MoeForConditionalGeneration",
    sizes=Qwen35MoESizes,
    names=ALL_NAMES,  # without mtp.*, whose experts are stacked in some folders only
    stacked={  # as published
        "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.gate_up_proj",
        "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.gate_up_proj",
        "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.down_proj",
    },
)


# --- the families ---------------------------------------------------------------------------------

# config.json of https://huggingface.co/Qwen/Qwen3.5-0.8B and so on
FLAVORS = {
    "debugmodel": Qwen35Sizes(256, 4, 8, 2, 768, **DEBUG),
    "0.8B": Qwen35Sizes(1024, 24, 8, 2, 3584, linear_value_heads=16, tied_embeddings=True),
    "2B": Qwen35Sizes(2048, 24, 8, 2, 6144, linear_value_heads=16, tied_embeddings=True),
    "4B": Qwen35Sizes(2560, 32, 16, 4, 9216, tied_embeddings=True),
    "9B": Qwen35Sizes(4096, 32, 16, 4, 12_288),
    "27B": Qwen35Sizes(5120, 64, 24, 4, 17_408, linear_value_heads=48),
}

LARGE: dict[str, Any] = {
    "linear_value_heads": 64,
    "expert_hidden_dim": 1024,
    "shared_hidden_dim": 1024,
}
MOE_FLAVORS = {
    "debugmodel": Qwen35MoESizes(256, 4, 8, 2, **DEBUG_EXPERTS, **DEBUG),
    "35B-A3B": Qwen35MoESizes(2048, 40, 16, 2),
    "122B-A10B": Qwen35MoESizes(3072, 48, 32, 2, **LARGE),
    "397B-A17B": Qwen35MoESizes(4096, 60, 32, 2, n_experts=512, n_active_experts=10, **LARGE),
}

TP_PLAN = {f"layers.*.attention.{layer}": "colwise" for layer in PROJECTIONS}

QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    flavors=FLAVORS,
    build=partial(Qwen3Next, linear=SplitDeltaNet),
    tp_plan={**QWEN3_NEXT.tp_plan, **TP_PLAN},
    hugging_face=HUGGING_FACE,
)
QWEN3_5_MOE = replace(
    QWEN3_5, name="qwen3_5_moe", flavors=MOE_FLAVORS, hugging_face=MOE_HUGGING_FACE
)
