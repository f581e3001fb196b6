"""Llama 3 as a model family: everything that other packages need to know about its module."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.models.llama3.huggingface import HUGGING_FACE
from titanlite.models.llama3.model import Llama, Llama3Sizes
from titanlite.models.shape import ModelShape
from titanlite.models.spec import ModelSpec

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
}

INIT_ROLES = {
    "*norm.weight": "ones",
    "*.wo.weight": "residual",  # scaled down by depth, so that the residual stream does not grow
    "*.w2.weight": "residual",
    "*": "normal",
}

ROLES = {
    "tok_embeddings.weight": "embedding",
    "output.weight": "output",
    "norm.weight": "output_gain",
    "*.q_norm.weight": "query_gain",
    "*norm.weight": "gain",
    "*.wq.weight": "query",
    "*": "hidden",
}


def check_sizes(sizes: Llama3Sizes) -> Iterator[ConfigError]:
    """Reject numbers of heads that do not fit together, and odd head widths."""
    if sizes.n_heads % sizes.n_kv_heads:
        yield ConfigError(
            f"model.n_kv_heads = {sizes.n_kv_heads}: does not divide model.n_heads ="
            f" {sizes.n_heads}; each key-value head serves the same number of query heads.",
            fix=f"Use a divisor of {sizes.n_heads}.",
            keys=("model.n_kv_heads", "model.n_heads"),
        )
    if not sizes.head_dim and sizes.dim % sizes.n_heads:
        yield ConfigError(
            f"model.dim = {sizes.dim}: is not a multiple of model.n_heads = {sizes.n_heads}.",
            fix="Change one of them, or set model.head_dim.",
            keys=("model.dim", "model.n_heads"),
        )
    elif sizes.head_width % 2:
        yield ConfigError(
            f"model.head_dim = {sizes.head_width}: RoPE rotates pairs of channels, so it must be"
            " even.",
            keys=("model.head_dim", "model.dim", "model.n_heads"),
        )


def shape(sizes: Llama3Sizes) -> ModelShape:
    """What the module consists of."""
    return ModelShape(
        name="llama3",
        n_layers=sizes.n_layers,
        dim=sizes.dim,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_width,
        hidden_dim=sizes.hidden_dim,
        vocab_size=sizes.vocab_size,
        tied_embeddings=sizes.tied_embeddings,
        qk_norm=sizes.qk_norm,
    )


def tied_parameters(sizes: Llama3Sizes) -> list[tuple[str, str]]:
    """The output weights and the embedding they are tied to, or an empty list."""
    return [("output.weight", "tok_embeddings.weight")] if sizes.tied_embeddings else []


LLAMA3 = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=Llama,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=shape,
    tied_parameters=tied_parameters,
    hugging_face=HUGGING_FACE,
    check_sizes=check_sizes,
    head_projections=["layers.*.attention.w[qkv]"],
)
