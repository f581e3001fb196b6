"""GPT-2 as Hugging Face's GPT2LMHeadModel: parameter names, and config.json both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlite.models.config_json import ConfigFormat
from titanlite.models.gpt2.model import GPT2Sizes
from titanlite.models.spec import HuggingFaceMapping, StoredPart

LAYERS = {  # layer of ours -> layer there, [in, out] instead of [out, in], and which part of it
    "attention.wq": ("attn.c_attn", StoredPart(True, 0, 3)),
    "attention.wk": ("attn.c_attn", StoredPart(True, 1, 3)),
    "attention.wv": ("attn.c_attn", StoredPart(True, 2, 3)),
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

GPT2_CONFIG = ConfigFormat(
    family="gpt2",
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    sizes=GPT2Sizes,
    keys={
        "dim": "n_embd",
        "n_layers": "n_layer",
        "n_heads": "n_head",
        "hidden_dim": "n_inner",
        "vocab_size": "vocab_size",
        "positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "tied_embeddings": "tie_word_embeddings",
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
)


def write_gpt2_config(sizes: GPT2Sizes, context: int) -> dict[str, Any]:
    """config.json; the context is the number of learned positions, and dropout is off."""
    off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return GPT2_CONFIG.write(sizes, **off)


def read_gpt2_config(config: Mapping[str, Any]) -> GPT2Sizes:
    """The sizes in a config.json; raises CheckpointError."""
    dim, inner = config.get("n_embd"), config.get("n_inner")
    if inner is None and isinstance(dim, int):
        inner = 4 * dim
    return GPT2_CONFIG.read({**config, "n_inner": inner})


HUGGING_FACE = HuggingFaceMapping(
    architecture=GPT2_CONFIG.architecture,
    names=NAMES,
    derived="*.attn.[bm]*",  # causal masks: h.0.attn.bias and h.0.attn.masked_bias
    to_config=write_gpt2_config,
    from_config=read_gpt2_config,
    parts=PARTS,
    optional_prefix="transformer.",
)
