"""DeepSeek-V3 as a model family: everything that other packages need to know about its module."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.models.decoder import decoder_shape
from titanlite.models.deepseek_v3.huggingface import HUGGING_FACE
from titanlite.models.deepseek_v3.model import DeepSeekV3, DeepSeekV3Sizes
from titanlite.models.router import LoadBalancing
from titanlite.models.shape import Experts, LatentAttention, ModelShape
from titanlite.models.spec import ModelSpec

FLAVORS = {
    "tiny": DeepSeekV3Sizes(
        dim=256,
        n_layers=4,
        n_heads=8,
        hidden_dim=768,
        vocab_size=2048,
        n_dense_layers=1,
        n_experts=8,
        n_active_experts=3,
        expert_hidden_dim=256,
        n_shared_experts=2,
        n_expert_groups=2,
        n_active_groups=1,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    # Moonlight 16B-A3B (https://arxiv.org/abs/2502.16982), as in its config.json
    "moonlight-16B": DeepSeekV3Sizes(
        dim=2048,
        n_layers=27,
        n_heads=16,
        hidden_dim=11_264,
        vocab_size=163_840,
        n_dense_layers=1,
        n_experts=64,
        n_active_experts=6,
        expert_hidden_dim=1408,
        n_shared_experts=2,
        route_scale=2.446,
        norm_eps=1e-5,
        rope_theta=50_000.0,
    ),
    # DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 4.2), as trained on 4,096 tokens
    "V3-671B": DeepSeekV3Sizes(
        dim=7168,
        n_layers=61,
        n_heads=128,
        hidden_dim=18_432,
        vocab_size=129_280,
        n_dense_layers=3,
        n_experts=256,
        n_active_experts=8,
        expert_hidden_dim=2048,
        n_expert_groups=8,
        n_active_groups=4,
        route_scale=2.5,
        q_lora_rank=1536,
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
    "tok_embeddings": "vocab_in",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.w*_a": "replicated",  # narrow: every rank computes them for all tokens
    "layers.*.attention.*_norm": "replicated",
    "layers.*.attention.w*_b": "colwise",
    "layers.*.attention.shared_key": "shared_by_heads",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "vocab_out",
}

ROLES = {
    "tok_embeddings.weight": "embedding",
    "output.weight": "output",
    "norm.weight": "output_gain",
    "*norm.weight": "gain",
    "*.attention.wq.weight": "query",
    "*.attention.wq_b.weight": "query",
    "*": "hidden",
}


def check_sizes(sizes: DeepSeekV3Sizes) -> Iterator[ConfigError]:
    """Reject widths of heads, RoPE settings and numbers of layers that the module cannot have."""
    if sizes.qk_rope_head_dim % 2:
        yield ConfigError(
            f"model.qk_rope_head_dim = {sizes.qk_rope_head_dim}: RoPE rotates pairs of channels, so"
            " it must be even.",
            keys=("model.qk_rope_head_dim",),
        )
    if sizes.rope_scaling is not None and sizes.rope_theta == 1:
        yield ConfigError(
            f"model.rope_scaling_factor = {sizes.rope_scaling_factor:g}: YaRN needs a"
            " model.rope_theta above 1.",
            keys=("model.rope_scaling_factor", "model.rope_theta"),
        )
    if sizes.v_head_dim > sizes.head_width:
        yield ConfigError(
            f"model.v_head_dim = {sizes.v_head_dim}: must not exceed the width of a head's key,"
            f" qk_nope_head_dim + qk_rope_head_dim = {sizes.head_width}.",
            keys=("model.v_head_dim", "model.qk_nope_head_dim", "model.qk_rope_head_dim"),
        )
    if sizes.n_dense_layers > sizes.n_layers:
        yield ConfigError(
            f"model.n_dense_layers = {sizes.n_dense_layers}: must not exceed model.n_layers ="
            f" {sizes.n_layers}.",
            keys=("model.n_dense_layers", "model.n_layers"),
        )


def shape(sizes: DeepSeekV3Sizes) -> ModelShape:
    """What the module consists of."""
    experts = Experts(
        count=sizes.n_experts,
        active=sizes.n_active_experts,
        hidden_dim=sizes.expert_hidden_dim,
        shared_hidden_dim=sizes.experts.shared_dim,
        dense_layers=sizes.n_dense_layers,
    )
    latent = LatentAttention(
        query_rank=sizes.q_lora_rank,
        key_value_rank=sizes.kv_lora_rank,
        rotary_dim=sizes.qk_rope_head_dim,
        value_dim=sizes.v_head_dim,
    )
    has_experts = sizes.n_dense_layers < sizes.n_layers
    return decoder_shape(
        "deepseek_v3", sizes, experts=experts if has_experts else None, latent=latent
    )


DEEPSEEK_V3 = ModelSpec(
    name="deepseek_v3",
    flavors=FLAVORS,
    flavor_hints=FLAVOR_HINTS,
    build=DeepSeekV3,
    tp_plan=TP_PLAN,
    init_roles={"*norm.weight": "ones", "*": "normal"},
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=shape,
    tied_parameters=lambda sizes: [],
    hugging_face=HUGGING_FACE,
    check_sizes=check_sizes,
    experts=lambda sizes: sizes.experts if sizes.n_dense_layers < sizes.n_layers else None,
    # section 4.2 of the report, as the standard deviation
    load_balancing=lambda sizes: LoadBalancing(bias_update_rate=0.001),
    init_std=0.006,
)
