"""GPT-2 as a model family."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.models.decoder import decoder_shape, tied_output
from titanlite.models.gpt2.huggingface import HUGGING_FACE
from titanlite.models.gpt2.model import GPT2, GPT2Sizes
from titanlite.models.spec import ModelSpec

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

TP_PLAN = {
    "tok_embeddings": "vocab_in",
    "pos_embeddings": "positions",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather_sequence",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather_sequence",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "vocab_out",
}

INIT_ROLES = {
    "*.bias": "zeros",
    "*norm.weight": "ones",
    "*.wo.weight": "residual",  # scaled down by depth, so that the residual stream does not grow
    "*.w2.weight": "residual",
    "*": "normal",
}

ROLES = {
    "*_embeddings.weight": "embedding",
    "output.weight": "output",
    "norm.*": "output_gain",
    "*.wq.bias": "query_bias",
    "*norm.weight": "gain",
    "*.bias": "gain",
    "*.wq.weight": "query",
    "*": "hidden",
}


def check_gpt2_sizes(sizes: GPT2Sizes) -> Iterator[ConfigError]:
    """Reject heads that do not divide the width."""
    if sizes.dim % sizes.n_heads:
        yield ConfigError(
            f"model.dim = {sizes.dim}: is not a multiple of model.n_heads = {sizes.n_heads}.",
            keys=("model.dim", "model.n_heads"),
        )


GPT2_FAMILY = ModelSpec(
    name="gpt2",
    flavors=FLAVORS,
    build=GPT2,
    tp_plan=TP_PLAN,
    init_roles=INIT_ROLES,
    parameter_roles=ROLES,
    blocks_path="layers",
    attention_pattern="layers.*.attention.attend",
    output_path="output",
    shape=lambda sizes: decoder_shape(
        "gpt2", sizes, gated=False, biases=True, positions=sizes.positions
    ),
    tied_parameters=tied_output,
    hugging_face=HUGGING_FACE,
    check_sizes=check_gpt2_sizes,
    head_projections=["layers.*.attention.w[qkv]"],
)
