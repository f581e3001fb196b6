"""Gemma 3's text models (https://arxiv.org/abs/2503.19786): norms before and behind each layer, a
sliding window and another RoPE base in five of six blocks, and scaled embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.models import sizes as size
from titanlite.models.config_json import LOCAL_ROPE_THETA, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import (
    CosSin,
    Decoder,
    FeedForward,
    RopeSettings,
    ZeroCentredNorm,
    check_heads,
)
from titanlite.models.llama import LLAMA3, Attention, LlamaSizes
from titanlite.models.llama import NAMES as LLAMA_NAMES
from titanlite.models.rope import LinearScaling
from titanlite.settings import Range


@dataclass(frozen=True)
class Gemma3Sizes(LlamaSizes):
    """The sizes of one Gemma 3 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 262_144
    head_dim: Annotated[int, Range(1), "elements per head"] = 256
    score_dim: Annotated[int, Range(1), "attention scores are divided by the root of it"] = 256
    window: size.OwnWindow = 1024
    full_attention_every: size.FullAttentionEvery = 6
    local_rope_theta: Annotated[float, Range(1), "base of RoPE in blocks with a window"] = 10_000.0
    rope_scaling_factor: Annotated[
        float, Range(1), "divides the RoPE frequencies of blocks without a window; 1: none"
    ] = 1.0
    tied_embeddings: size.TiedEmbeddings = True

    @property
    def rope_scaling(self) -> LinearScaling | None:
        return LinearScaling(self.rope_scaling_factor) if self.rope_scaling_factor > 1 else None

    def rotary_of(self, block: int) -> RopeSettings | None:
        if size.is_every(self.full_attention_every, block):
            return self.head_width, self.rope_theta, self.rope_scaling
        return self.head_width, self.local_rope_theta, None


class Gemma3Attention(Attention):
    """Llama's attention with other norms of queries and keys, and another scale of scores."""

    def __init__(self, sizes: Gemma3Sizes, block: int):
        super().__init__(sizes, block)
        self.q_norm = ZeroCentredNorm(sizes.head_width, eps=sizes.norm_eps)
        self.k_norm = ZeroCentredNorm(sizes.head_width, eps=sizes.norm_eps)
        self.query_factor = (sizes.head_width / sizes.score_dim) ** 0.5

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().queries_and_keys(x)
        return q if self.query_factor == 1 else q * self.query_factor, k


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its approximation by tanh."""
    return F.gelu(x, approximate="tanh")


class Gemma3Block(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    def __init__(self, sizes: Gemma3Sizes, block: int):
        super().__init__()
        norm = partial(ZeroCentredNorm, sizes.dim, eps=sizes.norm_eps)
        self.attention_norm, self.attention_out_norm = norm(), norm()
        self.attention = Gemma3Attention(sizes, block)
        self.ffn_norm, self.ffn_out_norm = norm(), norm()
        self.feed_forward = FeedForward(sizes.dim, sizes.hidden_dim, gelu_tanh)

    def forward(self, x: Tensor, rope: CosSin, *context: Any) -> Tensor:
        attended = self.attention(self.attention_norm(x), rope, *context)
        x = x + self.attention_out_norm(attended)
        return x + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x)))


class Gemma3(Decoder):
    """The transformer of Gemma 3."""

    def __init__(self, sizes: Gemma3Sizes):
        norm = ZeroCentredNorm(sizes.dim, eps=sizes.norm_eps)
        super().__init__(sizes, lambda block: Gemma3Block(sizes, block), sizes.rotary_of, norm)
        self.embedding_factor = sizes.dim**0.5


# --- Hugging Face ---------------------------------------------------------------------------------

NAMES = {
    **LLAMA_NAMES,
    "layers.*.attention_out_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.ffn_out_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}

HUGGING_FACE = HuggingFaceMapping(
    family="gemma3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    sizes=Gemma3Sizes,
    names=NAMES,
    own_keys={
        "score_dim": "query_pre_attn_scalar",
        "window": "sliding_window",
        "full_attention_every": "layer_types",
        "local_rope_theta": LOCAL_ROPE_THETA,
    },
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": SAME_AS_LLAMA["attention_bias"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        LOCAL_ROPE_THETA: 10_000.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "layer_types": 6,
    },
    implied=lambda config: {"layer_types": config.get("sliding_window_pattern")},
    rope_scaling={"rope_type": "linear"},
    intervals={"layer_types": ("sliding_attention", "full_attention")},
)


# --- the family -----------------------------------------------------------------------------------

LARGE: dict[str, Any] = {"vocab_size": 262_208, "rope_scaling_factor": 8.0}
FLAVORS = {
    "debugmodel": Gemma3Sizes(
        256, 6, 4, 2, 768, vocab_size=2048, head_dim=64, score_dim=64, window=64
    ),
    # https://arxiv.org/abs/2503.19786, section 2, and the config.json of
    # https://huggingface.co/google/gemma-3-1b-pt; the text part of the larger ones
    "270M": Gemma3Sizes(640, 18, 4, 1, 2048, window=512),
    "1B": Gemma3Sizes(1152, 26, 4, 1, 6912, window=512),
    "4B": Gemma3Sizes(2560, 34, 8, 4, 10_240, **LARGE),
    "12B": Gemma3Sizes(3840, 48, 16, 8, 15_360, **LARGE),
    "27B": Gemma3Sizes(5376, 62, 32, 16, 21_504, head_dim=128, score_dim=168, **LARGE),
}

TP_PLAN = {
    **LLAMA3.tp_plan,
    "layers.*.attention_out_norm": "sequence",
    "layers.*.ffn_out_norm": "sequence",
}


def check_gemma_heads(sizes: Gemma3Sizes) -> Iterator[ConfigError]:
    """Reject heads that do not fit; transformers refuses them, whatever their width."""
    yield from check_heads(sizes)
    if sizes.dim % sizes.n_heads:
        yield ConfigError(
            f"model.n_heads = {sizes.n_heads}: does not divide model.dim = {sizes.dim}, as"
            " transformers requires of Gemma 3.",
            fix="Change one of them.",
        )


GEMMA3 = replace(
    LLAMA3,
    name="gemma3",
    flavors=FLAVORS,
    build=Gemma3,
    tp_plan=TP_PLAN,
    init_roles={**LLAMA3.init_roles, "*norm.weight": "zeros"},
    hugging_face=HUGGING_FACE,
    check_sizes=check_gemma_heads,
)
