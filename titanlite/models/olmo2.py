"""OLMo 2 (https://arxiv.org/abs/2501.00656, section 3.1): norms behind attention and feed-forward,
and norms of the queries and of the keys of all heads together."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from torch import Tensor, nn

from titanlite.models import sizes as size
from titanlite.models.config_json import COMMON_DEFAULTS, SAME_AS_LLAMA, HuggingFaceMapping
from titanlite.models.decoder import CosSin, Decoder, FeedForward
from titanlite.models.llama import LLAMA3, Attention, LlamaSizes, default_key_value_heads
from titanlite.models.llama import NAMES as LLAMA_NAMES


@dataclass(frozen=True)
class Olmo2Sizes(LlamaSizes):
    """The sizes of one OLMo 2 model: its keys of [model]."""

    hidden_dim: size.HiddenDim
    _: KW_ONLY
    vocab_size: size.VocabSize = 100_352
    rope_theta: size.RopeTheta = 500_000.0
    tied_embeddings: size.TiedEmbeddings = False

    qk_norm = True


class Olmo2Attention(Attention):
    """Llama's attention with one norm of all queries, and one of all keys."""

    def __init__(self, sizes: Olmo2Sizes, block: int):
        super().__init__(sizes, block)
        self.q_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.k_norm = nn.RMSNorm(sizes.n_kv_heads * self.head_width, eps=sizes.norm_eps)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = (-1, self.head_width)
        q = self.q_norm(self.wq(x)).unflatten(-1, heads)
        return q, self.k_norm(self.wk(x)).unflatten(-1, heads)


class Olmo2Block(nn.Module):
    """Attention and feed-forward; what each adds to the residual stream is normalized."""

    def __init__(self, sizes: Olmo2Sizes, block: int):
        super().__init__()
        self.attention = Olmo2Attention(sizes, block)
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = FeedForward(sizes.dim, sizes.hidden_dim)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=sizes.norm_eps)

    def forward(self, x: Tensor, rope: CosSin | None, *context: Any) -> Tensor:
        x = x + self.attention_norm(self.attention(x, rope, *context))
        return x + self.ffn_norm(self.feed_forward(x))


class Olmo2(Decoder):
    """The transformer of OLMo 2."""

    def __init__(self, sizes: Olmo2Sizes):
        super().__init__(sizes, lambda block: Olmo2Block(sizes, block), sizes.rotary_of)


NAMES = {
    **LLAMA_NAMES,
    "layers.*.attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}

HUGGING_FACE = HuggingFaceMapping(
    family="olmo2",
    architecture="Olmo2ForCausalLM",
    sizes=Olmo2Sizes,
    names=NAMES,
    fixed={**SAME_AS_LLAMA, "sliding_window": None, "head_dim": None, "clip_qkv": None},
    defaults={**COMMON_DEFAULTS, "rms_norm_eps": 1e-5},
    implied=default_key_value_heads,
)

FLAVORS = {
    "debugmodel": Olmo2Sizes(256, 4, 8, 4, 768, vocab_size=2048),
    # config.json of https://huggingface.co/allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B
    "1B": Olmo2Sizes(2048, 16, 16, 16, 8192),
    "7B": Olmo2Sizes(4096, 32, 32, 32, 11_008),
    "13B": Olmo2Sizes(5120, 40, 40, 40, 13_824),
    "32B": Olmo2Sizes(5120, 64, 40, 8, 27_648),
}

TP_PLAN = {
    **LLAMA3.tp_plan,
    "layers.*.attention.q_norm": "projection",
    "layers.*.attention.k_norm": "projection",
}

OLMO2 = replace(
    LLAMA3,
    name="olmo2",
    flavors=FLAVORS,
    build=Olmo2,
    tp_plan=TP_PLAN,
    init_roles={"*norm.weight": "ones", "*": "normal"},  # arXiv 2501.00656, section 3.2
    hugging_face=HUGGING_FACE,
)
