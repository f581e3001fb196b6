"""gpt-oss (https://arxiv.org/abs/2508.10925): experts and attention with biases, attention sinks,
and a sliding window in every other block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention
from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, HuggingFaceMapping, StoredPart, rope_table
from titanlite.models.llama import LLAMA3, Attention, Llama
from titanlite.models.llama import NAMES as LLAMA_NAMES
from titanlite.models.mixtral import MIXTRAL, MixtralSizes, hugging_face_balancing
from titanlite.models.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from titanlite.models.rope import YarnScaling, yarn_factor
from titanlite.models.router import ExpertSizes
from titanlite.settings import Range


@dataclass(frozen=True)
class GptOssSizes(MixtralSizes):
    """The sizes of one model: its keys of [model]."""

    _: KW_ONLY
    n_experts: size.Experts = 32
    n_active_experts: size.ActiveExperts = 4
    vocab_size: size.VocabSize = 201_088
    head_dim: Annotated[int, Range(1), "elements per head"] = 64
    rope_theta: size.RopeTheta = 150_000.0
    rope_scaling_factor: Annotated[float, Range(1), "of RoPE frequencies (YaRN); 1: none"] = 32.0
    window: size.OwnWindow = 128
    full_attention_every: size.FullAttentionEvery = 2

    qkv_bias = True

    @property
    def rope_scaling(self) -> YarnScaling:
        factor = self.rope_scaling_factor
        return YarnScaling(factor, rotary_factor=yarn_factor(factor), truncate=False)

    @property
    def experts(self) -> ExpertSizes:
        return replace(super().experts, biases=True, clamped=True)


class GptOssAttention(Attention):
    """Llama's attention with a bias of each linear layer, and a sink of each query head."""

    def __init__(self, sizes: GptOssSizes, block: int):
        super().__init__(sizes, block)
        self.wo = nn.Linear(sizes.n_heads * self.head_width, sizes.dim)
        self.attend = CausalAttention(window=sizes.window_of(block), sinks=sizes.n_heads)


# --- Hugging Face ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertPart(StoredPart):
    """Stacked experts [E, N, K] as [E, K, N], or biases [E, N, 1] as [E, N].

    Of several parameters in one tensor, the outputs take turns.
    """

    is_bias: bool = False
    count: int = 1  # parameters in the tensor
    outputs: int = 1

    def stored_shape(self, shape: Sequence[int], outputs: int) -> torch.Size:
        experts, _, inputs = shape
        return torch.Size([experts, outputs] if self.is_bias else [experts, inputs, outputs])

    def read(
        self, stored: Any, offsets: Sequence[int], lengths: Sequence[int], first: int = 0
    ) -> Tensor:
        experts, outputs, inputs = (
            slice(first * turns, (first + n) * turns)
            for first, n, turns in zip(offsets, lengths, (1, self.count, 1), strict=True)
        )
        if self.is_bias:
            return stored[experts, outputs][:, self.index :: self.count].unsqueeze(-1)
        return stored[experts, inputs, outputs][..., self.index :: self.count].mT

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        joined = torch.stack(tuple(tensors), 2).flatten(1, 2).mT  # [E, K, N * count]
        return joined[:, 0] if self.is_bias else joined


@dataclass(frozen=True)
class GptOssMapping(HuggingFaceMapping[GptOssSizes]):
    """config.json of gpt-oss, which may say that the experts are stored in MXFP4."""

    def from_config(self, config: Mapping[str, Any]) -> GptOssSizes:
        quantized = config.get("quantization_config")
        if isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4":
            config = {key: value for key, value in config.items() if key != "quantization_config"}
        return super().from_config(config)


NAMES = {
    **LLAMA_NAMES,
    "layers.*.attention.wo.bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.attention.attend.sinks.weight": "model.layers.*.self_attn.sinks",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.router.weight",
    "layers.*.moe.router.gate.bias": "model.layers.*.mlp.router.bias",
    "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.gate_up_proj",
    "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.gate_up_proj",
    "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.down_proj",
    "layers.*.moe.experts.b1": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.moe.experts.b3": "model.layers.*.mlp.experts.gate_up_proj_bias",
    "layers.*.moe.experts.b2": "model.layers.*.mlp.experts.down_proj_bias",
}
PARTS = {
    f"layers.*.moe.experts.{kind}{number}": ExpertPart(
        index=index, count=count, is_bias=kind == "b"
    )
    for kind in "wb"
    for number, index, count in ((1, 0, 2), (2, 0, 1), (3, 1, 2))
}
YARN = {
    "rope_type": "yarn",
    "beta_fast": YarnScaling.fast_turns,
    "beta_slow": YarnScaling.slow_turns,
    "truncate": False,
    "original_max_position_embeddings": YarnScaling.original_context,
}


def yarn_if_missing(config: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers has instead of a missing table of RoPE's parameters; its factor is lacking,
    so that it is refused."""
    return {} if rope_table(config) else {"rope_type": "yarn"}


HUGGING_FACE = GptOssMapping(
    family="gpt_oss",
    reads_mxfp4=True,
    architecture="GptOssForCausalLM",
    sizes=GptOssSizes,
    names=NAMES,
    parts=PARTS,
    own_keys={
        "expert_hidden_dim": "intermediate_size",
        "n_experts": "num_local_experts",
        "window": "sliding_window",
        "full_attention_every": "layer_types",
    },
    fixed={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": SWIGLU_ALPHA,
        "swiglu_limit": SWIGLU_LIMIT,
    },
    defaults={
        **COMMON_DEFAULTS,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "layer_types": 2,
    },
    implied=yarn_if_missing,
    # without extension too: transformers takes null for a factor of 32
    further=lambda sizes: {"rope_scaling": {"factor": sizes.rope_scaling_factor, **YARN}},
    rope_scaling=YARN,
    intervals={"layer_types": ("sliding_attention", "full_attention")},
)


# --- the family -----------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": GptOssSizes(
        256, 4, 8, 4, 192, n_experts=8, vocab_size=2048, head_dim=64, window=64
    ),
    # https://arxiv.org/abs/2508.10925, table 1 and section 2; widths from config.json of
    # https://huggingface.co/openai/gpt-oss-20b and -120b
    "20B": GptOssSizes(2880, 24, 64, 8, 2880),
    "120B": GptOssSizes(2880, 36, 64, 8, 2880, n_experts=128),
}

GPT_OSS = replace(
    MIXTRAL,
    name="gpt_oss",
    flavors=FLAVORS,
    build=partial(Llama, attention=GptOssAttention),
    tp_plan={**LLAMA3.tp_plan, "layers.*.attention.attend.sinks": "per_head"},
    init_roles={"*.sinks.weight": "zeros", "*.experts.b?": "zeros", **LLAMA3.init_roles},
    parameter_roles={"*.sinks.weight": "gain", "*.experts.b?": "gain", **LLAMA3.parameter_roles},
    hugging_face=HUGGING_FACE,
    attention_sinks=True,
    # the default of transformers; what gpt-oss was trained with is not published
    load_balancing=lambda sizes: hugging_face_balancing(0.001, sizes),
)
