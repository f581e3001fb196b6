"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) as a single-device module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import CosSin, RopeSettings
from titanlite.models.llama import LLAMA3, Llama
from titanlite.models.llama import NAMES as LLAMA_NAMES
from titanlite.models.mtp import DEEPSEEK_NAMES, PredictionLayers, with_prediction_names
from titanlite.models.rope import YarnScaling, apply_rope, pair_halves
from titanlite.models.router import ExpertSizes, LoadBalancing
from titanlite.settings import Range

# Whatever the epsilon of the other norms: so does DeepseekV3Attention of transformers 5.23.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeepSeekV3Sizes:
    """The sizes of one model: its keys of [model]."""

    dim: size.Dim
    n_layers: size.Layers
    n_heads: size.Heads
    hidden_dim: size.HiddenDim
    vocab_size: size.VocabSize
    n_experts: size.Experts
    n_active_experts: size.ActiveExperts
    expert_hidden_dim: size.ExpertHiddenDim
    n_dense_layers: Annotated[int, Range(0), "first blocks, without experts"] = 0
    n_shared_experts: Annotated[int, Range(0), "experts that compute every token"] = 1
    n_expert_groups: Annotated[int, Range(1), "groups of consecutive experts"] = 1
    n_active_groups: Annotated[int, Range(1), "groups that a token may select experts from"] = 1
    route_scale: Annotated[float, Range(0), "factor of the weights of experts"] = 1.0
    q_lora_rank: Annotated[int, Range(0), "width that queries are projected from; 0: dim"] = 0
    kv_lora_rank: Annotated[int, Range(1), "width that keys and values are projected from"] = 512
    qk_nope_head_dim: Annotated[int, Range(1), "query and key elements per head without RoPE"] = 128
    qk_rope_head_dim: Annotated[int, Range(1), "query and key elements per head with RoPE"] = 64
    v_head_dim: Annotated[int, Range(1), "value elements per head"] = 128
    norm_eps: size.NormEps = 1e-6
    rope_theta: size.RopeTheta = 10_000.0
    rope_scaling_factor: Annotated[float, Range(1), "of RoPE frequencies (YaRN); 1: none"] = 1.0
    rope_fast_turns: Annotated[
        float, Range(1), "YaRN keeps pairs that turn as often or more over the original context"
    ] = YarnScaling.fast_turns
    mtp_layers: PredictionLayers = 0  # published: 1 of V3, 0 of the others

    tied_embeddings = False

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads: every query head has its own."""
        return self.n_heads

    @property
    def head_width(self) -> int:
        """Query and key elements per head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_scaling(self) -> YarnScaling | None:
        factor = self.rope_scaling_factor
        return YarnScaling(factor, fast_turns=self.rope_fast_turns) if factor > 1 else None

    def rotary_of(self, block: int) -> RopeSettings | None:
        return self.qk_rope_head_dim, self.rope_theta, self.rope_scaling

    @property
    def experts(self) -> ExpertSizes | None:
        return deepseek_experts(self)


def deepseek_experts(sizes: Any) -> ExpertSizes | None:
    """DeepSeek-V3's experts, of sizes with these keys; None: all blocks are dense."""
    if sizes.n_dense_layers >= sizes.n_layers:
        return None
    return ExpertSizes(
        count=sizes.n_experts,
        active=sizes.n_active_experts,
        hidden_dim=sizes.expert_hidden_dim,
        shared_dim=sizes.n_shared_experts * sizes.expert_hidden_dim,
        score="sigmoid",
        route_scale=sizes.route_scale,
        groups=sizes.n_expert_groups,
        active_groups=sizes.n_active_groups,
        selection_bias=True,
    )


class DeepSeekAttention(nn.Module):
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434, section 2.1).

    A head's query and key are features without a position, then rotated ones; all heads share the
    rotated features of the key.
    """

    def __init__(self, sizes: DeepSeekV3Sizes, block: int):
        super().__init__()
        self.head_width, self.rotary_dim = sizes.head_width, sizes.qk_rope_head_dim
        self.latent_dim, self.value_dim = sizes.kv_lora_rank, sizes.v_head_dim
        scaling = sizes.rope_scaling
        self.score_factor = scaling.score_factor if scaling else 1.0
        q_dim = sizes.n_heads * sizes.head_width
        if sizes.q_lora_rank:
            self.wq_a = nn.Linear(sizes.dim, sizes.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(sizes.q_lora_rank, eps=LATENT_NORM_EPS)
            self.wq_b = nn.Linear(sizes.q_lora_rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(sizes.dim, q_dim, bias=False)
        self.wkv_a = nn.Linear(sizes.dim, self.latent_dim + self.rotary_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.latent_dim, eps=LATENT_NORM_EPS)
        key_value_dim = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.wkv_b = nn.Linear(self.latent_dim, sizes.n_heads * key_value_dim, bias=False)
        self.shared_key = SharedKey()
        self.attend = CausalAttention()
        self.wo = nn.Linear(sizes.n_heads * sizes.v_head_dim, sizes.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: CosSin,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))) if hasattr(self, "wq_a") else self.wq(x)
        q = q.unflatten(-1, (-1, self.head_width))  # -> [B, T, H, K]
        q_plain, q_rotary = q.split([self.head_width - self.rotary_dim, self.rotary_dim], -1)
        q_rotary = apply_rope(pair_halves(q_rotary), rope)
        latent, k_rotary = self.wkv_a(x).split([self.latent_dim, self.rotary_dim], -1)
        k_rotary = self.shared_key(k_rotary, rope).expand(-1, -1, q.shape[2], -1)
        plain_dim = q_plain.shape[-1]
        keys_values = self.wkv_b(self.kv_norm(latent)).unflatten(
            -1, (-1, plain_dim + self.value_dim)
        )
        k_plain, v = keys_values.split([plain_dim, self.value_dim], -1)
        q = torch.cat([q_plain, q_rotary], -1)
        if self.score_factor != 1:
            q = q * self.score_factor
        k = torch.cat([k_plain, k_rotary], -1)
        # Few kernels take values of another width than the keys. Zeros change no output.
        v = F.pad(v, (0, self.head_width - self.value_dim))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)[..., : self.value_dim]
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, V] -> [B, T, H*V]


class SharedKey(nn.Module):
    """Rotates the key features that all heads share: [B, T, K] to [B, T, 1, K].

    A module, so that tensor parallelism can sum its gradient over the heads of all ranks.
    """

    def forward(self, k: Tensor, rope: CosSin) -> Tensor:
        return apply_rope(pair_halves(k.unsqueeze(2)), rope)


# --- Hugging Face ---------------------------------------------------------------------------------

EXPERT_NAMES = {
    "layers.*.moe.router.expert_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    "layers.*.moe.shared_experts.w1.weight": "model.layers.*.mlp.shared_experts.gate_proj.weight",
    "layers.*.moe.shared_experts.w3.weight": "model.layers.*.mlp.shared_experts.up_proj.weight",
    "layers.*.moe.shared_experts.w2.weight": "model.layers.*.mlp.shared_experts.down_proj.weight",
}
EXPERT_KEYS = {
    "n_dense_layers": "first_k_dense_replace",
    "n_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "n_shared_experts": "n_shared_experts",
    "n_expert_groups": "n_group",
    "n_active_groups": "topk_group",
    "route_scale": "routed_scaling_factor",
}

NAMES = {
    **LLAMA_NAMES,
    **EXPERT_NAMES,
    "layers.*.attention.wq_a.weight": "model.layers.*.self_attn.q_a_proj.weight",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_a_layernorm.weight",
    "layers.*.attention.wq_b.weight": "model.layers.*.self_attn.q_b_proj.weight",
    "layers.*.attention.wkv_a.weight": "model.layers.*.self_attn.kv_a_proj_with_mqa.weight",
    "layers.*.attention.kv_norm.weight": "model.layers.*.self_attn.kv_a_layernorm.weight",
    "layers.*.attention.wkv_b.weight": "model.layers.*.self_attn.kv_b_proj.weight",
}  # the rotated features are in the published order: pairs are (2i, 2i + 1)

SMALL_HEADS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}

HUGGING_FACE = HuggingFaceMapping(
    family="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    sizes=DeepSeekV3Sizes,
    names=with_prediction_names(NAMES, "model.layers.*.", DEEPSEEK_NAMES),
    own_keys={
        **EXPERT_KEYS,
        "q_lora_rank": "q_lora_rank",
        **{key: key for key in SMALL_HEADS},
        "rope_fast_turns": "beta_fast",
    },
    fixed={
        **SAME_AS_LLAMA,
        "tie_word_embeddings": False,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
    },
    defaults={**COMMON_DEFAULTS, "norm_topk_prob": True},
    null_is_zero=["q_lora_rank"],  # queries are projected from the hidden states
    further=lambda sizes: {
        "num_key_value_heads": sizes.n_heads,
        "num_nextn_predict_layers": sizes.mtp_layers,
    },
    rope_scaling={
        "rope_type": "yarn",
        "beta_fast": YarnScaling.fast_turns,
        "beta_slow": YarnScaling.slow_turns,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": YarnScaling.original_context,
    },
)


# --- the family -----------------------------------------------------------------------------------

GROUPS = {"n_expert_groups": 8, "n_active_groups": 4}
KIMI: dict[str, Any] = {"n_dense_layers": 1, "norm_eps": 1e-5, "rope_theta": 50_000.0}
FLAVORS = {
    "tiny": DeepSeekV3Sizes(
        256, 4, 8, 768, 2048, 8, 3, 256, 1, 2, 2, q_lora_rank=96, **SMALL_HEADS
    ),
    # Moonlight 16B-A3B (https://arxiv.org/abs/2502.16982), as in its config.json
    "moonlight-16B": DeepSeekV3Sizes(
        2048, 27, 16, 11_264, 163_840, 64, 6, 1408, n_shared_experts=2, route_scale=2.446, **KIMI
    ),
    # DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 4.2), as trained on 4,096 tokens
    "V3-671B": DeepSeekV3Sizes(
        7168, 61, 128, 18_432, 129_280, 256, 8, 2048, 3, route_scale=2.5, q_lora_rank=1536, **GROUPS
    ),
    # Kimi K2 (https://arxiv.org/abs/2507.20534, table 2, and config.json), trained on 4,096 tokens
    "kimi-k2-1T": DeepSeekV3Sizes(
        7168, 61, 64, 18_432, 163_840, 384, 8, 2048, route_scale=2.827, q_lora_rank=1536, **KIMI
    ),
}

# torchtitan v0.2.2's flavors are other models: but for 671B they have softmax scores without
# normalisation, and 671B has other epsilons, a document mask, and YaRN from 4,097 tokens on.
FLAVOR_HINTS = {
    "debugmodel": 'Use "tiny", which is another model than torchtitan\'s: see'
    " docs/reference/torchtitan.md.",
    "16B": "torchtitan's 16B has softmax scores, which this family does not have; moonlight-16B is"
    " another model.",
    "671B": 'Use "V3-671B", the published model; for what torchtitan\'s 671B has instead see'
    " docs/reference/torchtitan.md.",
}

TP_PLAN = {
    **LLAMA3.tp_plan,
    "layers.*.attention.w*_a": "replicated",  # narrow: every rank computes them for all tokens
    "layers.*.attention.q_norm": "replicated",
    "layers.*.attention.kv_norm": "replicated",
    "layers.*.attention.w*_b": "colwise",
    "layers.*.attention.shared_key": "shared_by_heads",
}
PARAMETER_ROLES = {"*.wq_b.weight": "query", **LLAMA3.parameter_roles, "*.q_norm.weight": "gain"}


def check_sizes(sizes: DeepSeekV3Sizes) -> Iterator[ConfigError]:
    """Reject widths of heads, RoPE settings and numbers of layers that the module cannot have."""
    if sizes.qk_rope_head_dim % 2:
        yield ConfigError(
            f"model.qk_rope_head_dim = {sizes.qk_rope_head_dim}: RoPE rotates pairs of channels, so"
            " it must be even."
        )
    if sizes.rope_scaling is not None and sizes.rope_theta == 1:
        yield ConfigError(
            f"model.rope_scaling_factor = {sizes.rope_scaling_factor:g}: YaRN needs a"
            " model.rope_theta above 1."
        )
    if sizes.v_head_dim > sizes.head_width:
        yield ConfigError(
            f"model.v_head_dim = {sizes.v_head_dim}: must not exceed the width of a head's key,"
            f" qk_nope_head_dim + qk_rope_head_dim = {sizes.head_width}."
        )
    yield from check_dense_layers(sizes)


def check_dense_layers(sizes: Any) -> Iterator[ConfigError]:
    """Reject more blocks without experts than there are."""
    if sizes.n_dense_layers > sizes.n_layers:
        yield ConfigError(
            f"model.n_dense_layers = {sizes.n_dense_layers}: must not exceed model.n_layers ="
            f" {sizes.n_layers}."
        )


DEEPSEEK_V3 = replace(
    LLAMA3,
    name="deepseek_v3",
    flavors=FLAVORS,
    flavor_hints=FLAVOR_HINTS,
    build=partial(Llama, attention=DeepSeekAttention),
    tp_plan=TP_PLAN,
    init_roles={"*norm.weight": "ones", "*": "normal"},
    parameter_roles=PARAMETER_ROLES,
    hugging_face=HUGGING_FACE,
    check_sizes=check_sizes,
    head_projections=(),
    # section 4.2 of the report, as the standard deviation
    load_balancing=lambda sizes: LoadBalancing(bias_update_rate=0.001),
    init_std=0.006,
)
