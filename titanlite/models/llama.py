"""Llama 3 (https://arxiv.org/abs/2407.21783) as a single-device module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any

from torch import Tensor, nn

from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.documents import DocumentIndex
from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import CosSin, Decoder, FeedForward, RopeSettings, check_heads
from titanlite.models.moe import MixtureOfExperts
from titanlite.models.mtp import PREDICTION_PLAN
from titanlite.models.rope import Llama3Scaling, RopeScaling, apply_rope
from titanlite.models.router import ExpertSizes
from titanlite.models.sizes import ModelSizes
from titanlite.models.spec import ModelSpec
from titanlite.settings import Range


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a family with the attention below; each family adds its own."""

    dim: size.Dim
    n_layers: size.Layers
    n_heads: size.Heads
    n_kv_heads: size.KeyValueHeads
    _: KW_ONLY
    norm_eps: size.NormEps = 1e-6
    rope_theta: size.RopeTheta = 1_000_000.0

    # class attributes, not fields: of the families that do not have these keys
    head_dim = window = full_attention_every = n_dense_layers = 0
    qkv_bias = qk_norm = tied_embeddings = False

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def rope_scaling(self) -> RopeScaling | None:
        """Extension of the context; None: no extension."""
        return None

    def window_of(self, block: int) -> int:
        """The tokens that a token attends to in block number `block`; 0: to all up to itself."""
        return 0 if size.is_every(self.full_attention_every, block) else self.window

    def rotary_of(self, block: int) -> RopeSettings | None:
        """How queries and keys of block number `block` are rotated; None: not at all."""
        return self.head_width, self.rope_theta, self.rope_scaling

    @property
    def experts(self) -> ExpertSizes | None:
        """What the blocks have in place of a feed-forward layer; None: no experts."""
        return None


@dataclass(frozen=True)
class Llama3Sizes(LlamaSizes):
    """The sizes of one Llama 3 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 128_256
    head_dim: size.HeadDim = 0
    norm_eps: size.NormEps = 1e-5
    rope_theta: size.RopeTheta = 500_000.0
    rope_scaling_factor: Annotated[float, Range(1), "of Llama 3.1; 1: none"] = 1.0
    qk_norm: Annotated[bool, "RMSNorm on every query and key head"] = False
    tied_embeddings: size.TiedEmbeddings = False

    @property
    def rope_scaling(self) -> Llama3Scaling | None:
        return Llama3Scaling(self.rope_scaling_factor) if self.rope_scaling_factor > 1 else None


class Attention(nn.Module):
    """Grouped-query causal attention with rotary embedding.

    Optional: biases of queries, keys and values, and an RMSNorm of each query and key head.
    """

    def __init__(self, sizes: Any, block: int):
        super().__init__()
        self.head_width = sizes.head_width
        q_dim, kv_dim = sizes.n_heads * self.head_width, sizes.n_kv_heads * self.head_width
        self.wq = nn.Linear(sizes.dim, q_dim, bias=sizes.qkv_bias)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=sizes.qkv_bias)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=sizes.qkv_bias)
        self.wo = nn.Linear(q_dim, sizes.dim, bias=False)
        self.attend = CausalAttention(window=sizes.window_of(block))
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)
            self.k_norm = nn.RMSNorm(self.head_width, eps=sizes.norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: CosSin | None,
        documents: DocumentIndex | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        q, k = self.queries_and_keys(x)
        v = self.wv(x).unflatten(-1, (-1, self.head_width))
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # -> [B, H, T, K]
        out = self.attend(q, k, v, documents, cache)
        return self.wo(out.transpose(1, 2).flatten(-2))  # [B, H, T, K] -> [B, T, H*K]

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, K] and keys [B, T, Hkv, K], normalized if the model does so."""
        heads = (-1, self.head_width)  # -1: a tensor-parallel rank has only some of the heads
        q = self.q_norm(self.wq(x).unflatten(-1, heads))  # [B, T, H*K] -> [B, T, H, K]
        return q, self.k_norm(self.wk(x).unflatten(-1, heads))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after an RMSNorm and added to the residual stream.

    With `experts`, the feed-forward layer is a mixture of them. `context` of this and other blocks:
    the documents and the cache of `Attention.forward`.
    """

    def __init__(self, sizes: ModelSizes, attention: nn.Module, experts: ExpertSizes | None = None):
        super().__init__()
        self.attention_norm: nn.Module = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.attention = attention
        self.ffn_norm: nn.Module = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.has_experts = experts is not None
        if experts is None:
            self.feed_forward: nn.Module = FeedForward(sizes.dim, sizes.hidden_dim)
        else:
            self.moe = MixtureOfExperts(sizes.dim, experts)

    def forward(self, x: Tensor, rope: CosSin | None, *context: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, *context)
        feed_forward = self.moe if self.has_experts else self.feed_forward
        return x + feed_forward(self.ffn_norm(x))


class Llama(Decoder):
    """The transformer of Llama, and of families with other sizes or attention in these blocks."""

    def __init__(self, sizes: Any, attention: Callable[[Any, int], nn.Module] = Attention):
        def build_block(index: int) -> nn.Module:
            experts = sizes.experts if index >= sizes.n_dense_layers else None
            return TransformerBlock(sizes, attention(sizes, index), experts)

        super().__init__(sizes, build_block, sizes.rotary_of)


# --- Hugging Face ---------------------------------------------------------------------------------

NAMES = {  # of every parameter that one of the families with these blocks has
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
    "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
    "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
    "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
    "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.{expert}.gate_proj.weight",
    "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.{expert}.up_proj.weight",
    "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.{expert}.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}  # the tensors are equal, without a permutation: rotary pairs are (i, i + K/2) in both


def default_key_value_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key-value heads of a config.json that leaves them out."""
    return {"num_key_value_heads": config.get("num_attention_heads")}


def null_key_value_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key-value heads of a config.json in which they are null."""
    return default_key_value_heads(config) if "num_key_value_heads" in config else {}


HUGGING_FACE = HuggingFaceMapping(
    family="llama3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    sizes=Llama3Sizes,
    names=NAMES,
    fixed={**SAME_AS_LLAMA, "sliding_window": None},
    defaults={**COMMON_DEFAULTS, "head_dim": 0},
    implied=default_key_value_heads,
    rope_scaling={
        "rope_type": "llama3",
        "low_freq_factor": Llama3Scaling.low_frequency_factor,
        "high_freq_factor": Llama3Scaling.high_frequency_factor,
        "original_max_position_embeddings": Llama3Scaling.original_context,
    },
)


# --- the family -----------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": Llama3Sizes(256, 6, 16, 16, 768, vocab_size=2048),
    "quickstart": Llama3Sizes(256, 4, 4, 2, 768, vocab_size=4096, rope_theta=10_000.0),
    # Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B, as published on their model cards
    "1B": Llama3Sizes(2048, 16, 32, 8, 8192, tied_embeddings=True, rope_scaling_factor=32.0),
    "3B": Llama3Sizes(3072, 28, 24, 8, 8192, tied_embeddings=True, rope_scaling_factor=32.0),
    "8B": Llama3Sizes(4096, 32, 32, 8, 14_336, rope_scaling_factor=8.0),
    "70B": Llama3Sizes(8192, 80, 64, 8, 28_672, rope_scaling_factor=8.0),
    "405B": Llama3Sizes(16_384, 126, 128, 8, 53_248, rope_scaling_factor=8.0),
}

TP_PLAN = {
    "tok_embeddings": "vocab_in",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise_kv",
    "layers.*.attention.wv": "colwise_kv",
    "layers.*.attention.q_norm": "heads",
    "layers.*.attention.k_norm": "heads",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "vocab_out",
    **PREDICTION_PLAN,
}

INIT_ROLES = {
    "*.bias": "zeros",
    "*norm.weight": "ones",
    "*.wo.weight": "residual",  # scaled down by depth, so that the residual stream does not grow
    "*.w2*": "residual",  # of experts, too
    "*": "normal",
}

PARAMETER_ROLES = {
    "*_embeddings.weight": "embedding",
    "output.weight": "output",
    "norm.*": "output_gain",
    "layers.*.norm.weight": "output_gain",  # of multi-token prediction
    "*.q_norm.weight": "query_gain",
    "*norm.weight": "gain",
    "*.wq.weight": "query",
    "*.wq.bias": "query_bias",
    "*.bias": "gain",
    "*": "hidden",
}


LLAMA3: ModelSpec[Any] = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=Llama,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=PARAMETER_ROLES,
    hugging_face=HUGGING_FACE,
    check_sizes=check_heads,
    head_projections=["layers.*.attention.w[qkv]"],
)

# Llama 2 (https://arxiv.org/abs/2307.09288): the same blocks in other sizes
LLAMA2_FLAVORS = {
    "debugmodel": Llama3Sizes(256, 4, 4, 4, 768, vocab_size=2048, rope_theta=10_000.0),
    # config.json of https://huggingface.co/meta-llama/Llama-2-7b-hf, -13b-hf and -70b-hf
    "7B": Llama3Sizes(4096, 32, 32, 32, 11_008, vocab_size=32_000, rope_theta=10_000.0),
    "13B": Llama3Sizes(5120, 40, 40, 40, 13_824, vocab_size=32_000, rope_theta=10_000.0),
    "70B": Llama3Sizes(8192, 80, 64, 8, 28_672, vocab_size=32_000, rope_theta=10_000.0),
}

LLAMA2 = replace(LLAMA3, name="llama2", flavors=LLAMA2_FLAVORS)
