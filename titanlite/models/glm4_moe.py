"""GLM-4.5 (https://arxiv.org/abs/2508.06471): Llama's blocks with biases, RoPE on half of each
head, and DeepSeek-V3's experts and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from titanlite.errors import ConfigError
from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import RopeSettings, check_heads
from titanlite.models.deepseek_v3 import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    check_dense_layers,
    deepseek_experts,
)
from titanlite.models.llama import LLAMA3, NAMES, LlamaSizes
from titanlite.models.mtp import DEEPSEEK_NAMES, PredictionLayers, with_prediction_names
from titanlite.models.router import ExpertSizes, LoadBalancing
from titanlite.settings import Range


@dataclass(frozen=True)
class Glm4MoESizes(LlamaSizes):
    """The sizes of one model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    n_experts: size.Experts
    n_active_experts: size.ActiveExperts
    expert_hidden_dim: size.ExpertHiddenDim
    _: KW_ONLY
    n_dense_layers: Annotated[int, Range(0), "first blocks, without experts"] = 1
    n_shared_experts: Annotated[int, Range(0), "experts that compute every token"] = 1
    n_expert_groups: Annotated[int, Range(1), "groups of consecutive experts"] = 1
    n_active_groups: Annotated[int, Range(1), "groups that a token may select experts from"] = 1
    route_scale: Annotated[float, Range(0), "factor of the weights of experts"] = 1.0
    vocab_size: size.VocabSize = 151_552
    head_dim: size.HeadDim = 128
    norm_eps: size.NormEps = 1e-5
    qkv_bias: Annotated[bool, "biases of queries, keys and values"] = True
    qk_norm: Annotated[bool, "RMSNorm on every query and key head"] = False
    mtp_layers: PredictionLayers = 0  # published: 1

    def rotary_of(self, block: int) -> RopeSettings | None:
        return self.head_width // 2, self.rope_theta, None  # the other half is not rotated

    @property
    def experts(self) -> ExpertSizes | None:
        return deepseek_experts(self)


ROTATED = "partial_rotary_factor"

HUGGING_FACE = HuggingFaceMapping(
    family="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    sizes=Glm4MoESizes,
    names=with_prediction_names({**NAMES, **EXPERT_NAMES}, "model.layers.*.", DEEPSEEK_NAMES),
    own_keys={**EXPERT_KEYS, "qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
    fixed={
        "hidden_act": SAME_AS_LLAMA["hidden_act"],
        "tie_word_embeddings": False,
        ROTATED: 0.5,
        "norm_topk_prob": True,
    },
    defaults={
        **COMMON_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "head_dim": 0,
        ROTATED: 0.5,
        "norm_topk_prob": True,
        "attention_bias": False,
        "use_qk_norm": False,
    },
    # transformers 5 rotates whole heads if it is null
    implied=lambda config: {ROTATED: None if config.get(ROTATED, 0.5) else 1.0},
    further=lambda sizes: {"num_nextn_predict_layers": sizes.mtp_layers},
)

FLAVORS = {
    "debugmodel": Glm4MoESizes(
        256, 4, 8, 2, 768, 8, 3, 192, vocab_size=2048, head_dim=32, qk_norm=True
    ),
    # https://arxiv.org/abs/2508.06471, table 1, and the config.json of
    # https://huggingface.co/zai-org/GLM-4.5-Air-Base and GLM-4.5-Base
    "Air-106B": Glm4MoESizes(4096, 46, 96, 8, 10_944, 128, 8, 1408),
    "355B": Glm4MoESizes(
        5120, 92, 96, 8, 12_288, 160, 8, 1536, n_dense_layers=3, route_scale=2.5, qk_norm=True
    ),
}


def check_glm_sizes(sizes: Glm4MoESizes) -> Iterator[ConfigError]:
    """Reject heads and numbers of layers that the module cannot have."""
    yield from check_heads(sizes)
    yield from check_dense_layers(sizes)
    if sizes.head_width % 4:
        yield ConfigError(
            f"model.head_dim = {sizes.head_width}: RoPE rotates pairs of channels of half a head,"
            " so it must be a multiple of 4."
        )


GLM4_MOE = replace(
    LLAMA3,
    name="glm4_moe",
    flavors=FLAVORS,
    hugging_face=HUGGING_FACE,
    check_sizes=check_glm_sizes,
    # section 2.4 of the report
    load_balancing=lambda sizes: LoadBalancing(bias_update_rate=0.001),
)
