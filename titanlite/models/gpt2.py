"""GPT-2 as a single-device module.

Language Models are Unsupervised Multitask Learners, Radford et al., 2019, section 2.3: LayerNorm
before attention and feed-forward, learned positions, GELU, biases, tied embeddings. No dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models import sizes as size
from titanlite.models.config_json import HuggingFaceMapping, StoredPart
from titanlite.models.decoder import Decoder, PositionEmbedding
from titanlite.models.llama import LLAMA3, Attention, TransformerBlock
from titanlite.settings import Range


@dataclass(frozen=True)
class GPT2Sizes:
    """The sizes of one GPT-2 model: its keys of [model]."""

    dim: size.Dim
    n_layers: size.Layers
    n_heads: size.Heads
    hidden_dim: size.HiddenDim
    vocab_size: size.VocabSize = 50_257
    positions: Annotated[int, Range(1), "learned positions: the longest sequence"] = 1024
    norm_eps: size.NormEps = 1e-5
    tied_embeddings: size.TiedEmbeddings = True

    qkv_bias, qk_norm = True, False

    @property
    def n_kv_heads(self) -> int:
        """Key-value heads: as many as query heads."""
        return self.n_heads

    @property
    def head_width(self) -> int:
        """Elements per head."""
        return self.dim // self.n_heads

    def window_of(self, block: int) -> int:
        return 0


class GPT2Attention(Attention):
    """Llama's attention, all of whose linear layers have biases."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__(sizes, 0)
        self.wo = nn.Linear(sizes.dim, sizes.dim)


class GPT2FeedForward(nn.Module):
    """Two linear layers with the tanh form of GELU (https://arxiv.org/abs/1606.08415)."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden_dim)
        self.w2 = nn.Linear(sizes.hidden_dim, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class GPT2Block(TransformerBlock):
    """Attention and feed-forward, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__(sizes, GPT2Attention(sizes))
        self.attention_norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.ffn_norm = nn.LayerNorm(sizes.dim, eps=sizes.norm_eps)
        self.feed_forward = GPT2FeedForward(sizes)


class GPT2(Decoder):
    """The transformer of GPT-2."""

    def __init__(self, sizes: GPT2Sizes):
        super().__init__(
            sizes,
            lambda index: GPT2Block(sizes),
            norm=nn.LayerNorm(sizes.dim, eps=sizes.norm_eps),
            pos_embeddings=PositionEmbedding(sizes.positions, sizes.dim),
        )


# --- Hugging Face ---------------------------------------------------------------------------------

LAYERS = {  # layer of ours -> layer there, [in, out] instead of [out, in], and which part of it
    "attention.wq": ("attn.c_attn", StoredPart(True, 0)),
    "attention.wk": ("attn.c_attn", StoredPart(True, 1)),
    "attention.wv": ("attn.c_attn", StoredPart(True, 2)),
    "attention.wo": ("attn.c_proj", StoredPart(True)),
    "feed_forward.w1": ("mlp.c_fc", StoredPart(True)),
    "feed_forward.w2": ("mlp.c_proj", StoredPart(True)),
    "attention_norm": ("ln_1", StoredPart()),
    "ffn_norm": ("ln_2", StoredPart()),
}
BLOCK_NAMES = {
    f"layers.*.{ours}.{leaf}": f"transformer.h.*.{theirs}.{leaf}"
    for ours, (theirs, _) in LAYERS.items()
    for leaf in ("weight", "bias")
}
NAMES = {
    "tok_embeddings.weight": "transformer.wte.weight",
    "pos_embeddings.weight": "transformer.wpe.weight",
    **BLOCK_NAMES,
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
PARTS = {
    f"layers.*.{ours}.{leaf}": part
    for ours, (_, part) in LAYERS.items()
    for leaf in ("weight", "bias")
}


def default_width(config: Mapping[str, Any]) -> dict[str, Any]:
    """The width of the feed-forward layer of a config.json that leaves it out."""
    dim = config.get("n_embd")
    return {"n_inner": 4 * dim if isinstance(dim, int) else None}


HUGGING_FACE = HuggingFaceMapping(
    family="gpt2",
    architecture="GPT2LMHeadModel",
    sizes=GPT2Sizes,
    names=NAMES,
    parts=PARTS,
    optional_prefix="transformer.",
    derived=["*.attn.[bm]*"],  # causal masks: h.0.attn.bias and h.0.attn.masked_bias
    own_keys={
        "dim": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "hidden_dim": "n_inner",
        "positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    defaults={
        "vocab_size": 50_257,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    implied=default_width,
    further=lambda sizes: {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},  # dropout
)


# --- the family -----------------------------------------------------------------------------------

FLAVORS = {
    "debugmodel": GPT2Sizes(256, 4, 4, 1024, vocab_size=2048, positions=256),
    # nanoGPT's model for a CPU, of characters: https://github.com/karpathy/nanoGPT#quick-start
    "characters": GPT2Sizes(128, 4, 4, 512, vocab_size=65, positions=64),
    # config.json of https://huggingface.co/openai-community/gpt2, gpt2-medium, -large and -xl
    "124M": GPT2Sizes(768, 12, 12, 3072),
    "355M": GPT2Sizes(1024, 24, 16, 4096),
    "774M": GPT2Sizes(1280, 36, 20, 5120),
    "1.5B": GPT2Sizes(1600, 48, 25, 6400),
}

GPT2_FAMILY = replace(
    LLAMA3,
    name="gpt2",
    flavors=FLAVORS,
    build=GPT2,
    tp_plan={**LLAMA3.tp_plan, "pos_embeddings": "positions"},
    hugging_face=HUGGING_FACE,
)
