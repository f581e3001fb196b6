"""Llama 3 as a model family: everything that other packages need to know about its module."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.errors import ConfigError
from titanlite.models.llama3.huggingface import HUGGING_FACE
from titanlite.models.llama3.model import Llama, Llama3Sizes
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


def count_parameters(sizes: Llama3Sizes) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    vocab_matrices = 1 if sizes.tied_embeddings else 2
    outside_blocks = vocab_matrices * sizes.vocab_size * sizes.dim + sizes.dim
    return sizes.n_layers * count_block_parameters(sizes) + outside_blocks


def count_block_parameters(sizes: Llama3Sizes) -> int:
    """Parameters of one block."""
    norms = 2 * sizes.dim + (2 * sizes.head_width if sizes.qk_norm else 0)
    return _block_matmul_weights(sizes) + norms


def _block_matmul_weights(sizes: Llama3Sizes) -> int:
    heads = (sizes.n_heads * 2 + sizes.n_kv_heads * 2) * sizes.head_width
    return sizes.dim * (heads + 3 * sizes.hidden_dim)


def activations_per_block(sizes: Llama3Sizes) -> int:
    """Elements per token that autograd saves for one block that computes in fp32.

    In bf16, a CPU saves up to a third more, because its norms compute in fp32.
    """
    queries, keys = (heads * sizes.head_width for heads in (sizes.n_heads, sizes.n_kv_heads))
    normed = 2 * (queries + keys) if sizes.qk_norm else 0
    return 5 * sizes.dim + 3 * queries + 2 * keys + normed + 4 * sizes.hidden_dim


def flops_per_token(sizes: Llama3Sizes, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs per token: 6 per matmul weight, plus attention.

    Attention costs 12 L H K T counted in full (PaLM, https://arxiv.org/abs/2204.02311, appendix B),
    and half of that counted causally.
    """
    output = 6 * sizes.vocab_size * sizes.dim
    return sizes.n_layers * _block_flops(sizes, seq_len, 1.0 if full_attention else 0.5) + output


def _block_flops(sizes: Llama3Sizes, seq_len: int, attended: float) -> float:
    """FLOPs per token of one block; a token attends to the fraction `attended` of the sequence."""
    attention = 12 * sizes.n_heads * sizes.head_width * seq_len * attended
    return 6 * _block_matmul_weights(sizes) + attention


def module_flops(sizes: Llama3Sizes, seq_len: int) -> dict[str, float]:
    """Forward and backward FLOPs per token of each module, in execution order.

    Modules without matmuls count their element-wise operations: an embedding copies a row and adds
    its gradient; the loss, which is part of the output layer, takes about ten per logit.
    """
    block = _block_flops(sizes, seq_len, 0.5)
    blocks = {f"layers.{index}": block for index in range(sizes.n_layers)}
    output = sizes.vocab_size * (6 * sizes.dim + 10)
    return {"tok_embeddings": 2.0 * sizes.dim, **blocks, "norm": 10.0 * sizes.dim, "output": output}


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
    count_parameters=count_parameters,
    count_block_parameters=count_block_parameters,
    activations_per_block=activations_per_block,
    flops_per_token=flops_per_token,
    module_flops=module_flops,
    tied_parameters=tied_parameters,
    hugging_face=HUGGING_FACE,
    check_sizes=check_sizes,
    head_projections=["layers.*.attention.w[qkv]"],
)
