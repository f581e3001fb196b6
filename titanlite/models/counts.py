"""Parameters and FLOPs of a model, counted from its shape."""

from __future__ import annotations

from titanlite.models.shape import ModelShape


def attention_weights(shape: ModelShape) -> int:
    """Matmul weights of a block's attention."""
    queries = shape.n_heads * shape.head_dim
    out = shape.n_heads * shape.value_dim * shape.dim
    if (latent := shape.latent) is None:
        return shape.dim * (queries + 2 * shape.n_kv_heads * shape.head_dim) + out
    rank = latent.query_rank
    to_queries = (shape.dim + queries) * rank if rank else shape.dim * queries
    to_latent = shape.dim * (latent.key_value_rank + latent.rotary_dim)
    unrotated = shape.head_dim - latent.rotary_dim
    to_heads = latent.key_value_rank * shape.n_heads * (unrotated + latent.value_dim)
    return to_queries + to_latent + to_heads + out


def feed_forward_weights(shape: ModelShape, hidden_dim: int) -> int:
    """Matmul weights of a feed-forward layer, or of an expert."""
    return (3 if shape.gated else 2) * shape.dim * hidden_dim


def block_matmul_weights(shape: ModelShape, block: int, active_only: bool = False) -> int:
    """Matmul weights of one block; `active_only`: only those that a token is multiplied with."""
    weights = attention_weights(shape)
    if not shape.has_experts(block):
        return weights + feed_forward_weights(shape, shape.hidden_dim)
    experts = shape.experts
    assert experts is not None
    count = experts.active if active_only else experts.count
    width = count * experts.hidden_dim + experts.shared_hidden_dim
    router = shape.dim * experts.count
    return weights + router + feed_forward_weights(shape, width)


def _block_vectors(shape: ModelShape, block: int) -> int:
    """Elements of a block's norms and biases."""
    norms = shape.norms_per_block * shape.dim * (2 if shape.biases is True else 1)
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    if shape.qk_norm == "projections":
        norms += queries + keys
    elif shape.qk_norm:
        norms += 2 * shape.head_dim
    if shape.latent:
        norms += shape.latent.query_rank + shape.latent.key_value_rank
    if shape.biases:
        norms += queries + 2 * keys
    if shape.biases is not True:
        return norms
    feed_forward = shape.hidden_dim * (2 if shape.gated else 1)
    return norms + shape.dim + feed_forward + shape.dim


def count_block_parameters(shape: ModelShape, block: int) -> int:
    """Parameters of block number `block`."""
    return block_matmul_weights(shape, block) + _block_vectors(shape, block)


def count_blocks(shape: ModelShape) -> int:
    """Parameters of all blocks; in constant time, as a file may describe any number of them."""
    dense = min(shape.experts.dense_layers, shape.n_layers) if shape.experts else shape.n_layers
    with_experts = shape.n_layers - dense
    total = dense * count_block_parameters(shape, 0) if dense else 0
    return total + (with_experts * count_block_parameters(shape, dense) if with_experts else 0)


def count_parameters(shape: ModelShape) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    rows = (1 if shape.tied_embeddings else 2) * shape.vocab_size + shape.positions
    norm = 2 if shape.biases is True else 1
    return count_blocks(shape) + (rows + norm) * shape.dim


def count_active_parameters(shape: ModelShape) -> int:
    """Parameters that one token uses: all but those of experts that it is not routed to."""
    blocks = range(shape.n_layers)
    idle = sum(
        block_matmul_weights(shape, block) - block_matmul_weights(shape, block, active_only=True)
        for block in blocks
    )
    return count_parameters(shape) - idle


def _attended(shape: ModelShape, block: int, seq_len: int, full: bool) -> float:
    """Mean number of tokens that a token attends to; `full`: as if also to later ones."""
    window = min(shape.window_of(block) or seq_len, seq_len)
    return window if full else window * (1 - window / (2 * seq_len)) if seq_len else 0.0


def block_flops(shape: ModelShape, block: int, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs per token of one block: 6 per matmul weight, plus attention.

    Attention costs 6 H (K + V) T counted in full, where K and V are the features of a head's key
    and value: 12 H K T where they are equal (PaLM, https://arxiv.org/abs/2204.02311, appendix B).
    Counted causally, it is half of that.
    """
    features = shape.n_heads * (shape.head_dim + shape.value_dim)
    attention = 6 * features * _attended(shape, block, seq_len, full_attention)
    return 6 * block_matmul_weights(shape, block, active_only=True) + attention


def flops_per_token(shape: ModelShape, seq_len: int, full_attention: bool = False) -> float:
    """Forward and backward FLOPs per token of the model."""
    blocks = (block_flops(shape, b, seq_len, full_attention) for b in range(shape.n_layers))
    return sum(blocks) + 6 * shape.vocab_size * shape.dim


def module_flops(shape: ModelShape, seq_len: int, blocks_path: str = "layers") -> dict[str, float]:
    """Forward and backward FLOPs per token of each module, in execution order.

    Modules without matmuls count their element-wise operations: an embedding copies a row and adds
    its gradient; the loss, which is part of the output layer, takes about ten per logit.
    """
    blocks = {
        f"{blocks_path}.{block}": block_flops(shape, block, seq_len)
        for block in range(shape.n_layers)
    }
    embeddings = {"tok_embeddings": 2.0 * shape.dim}
    if shape.positions:
        embeddings["pos_embeddings"] = 2.0 * shape.dim
    output = shape.vocab_size * (6 * shape.dim + 10)
    return {**embeddings, **blocks, "norm": 10.0 * shape.dim, "output": output}
