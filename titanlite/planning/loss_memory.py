"""Bytes of the output layer and its loss."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.planning.activation_memory import BlockActivations


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the output layer and the loss of one micro-batch."""

    saved: float = 0.0  # between forward and backward
    forward_temporaries: float = 0.0
    backward_temporaries: float = 0.0


def loss_bytes(activations: BlockActivations, weight_elements: int, chunked: bool) -> LossBytes:
    """The loss of titanlite (`chunked`): gradients are computed in forward, chunk by chunk.

    Otherwise the logits are saved in the compute dtype, and their softmax in fp32.
    """
    workload, size = activations.workload, activations.size
    vocabulary = workload.model.vocab_size / workload.layout.tensor
    tokens = activations.tokens
    chunk = min(tokens, workload.loss_chunk_tokens or tokens)
    if not chunked:
        logits = tokens * vocabulary
        return LossBytes(logits * (size + 4), logits * 4, logits * size)
    # the normed hidden states; tensor ranks have their shard as well
    inputs = activations.hidden + (activations.residual if workload.layout.tensor > 1 else 0.0)
    cast = size if size < 4 else 0
    sum_size = 4 if chunk < tokens else size
    weights = weight_elements * sum_size
    logits = chunk * vocabulary * (4 + cast)
    first = logits + (weights if chunk < tokens else 0)
    gradient = chunk * vocabulary * size + weight_elements * size
    second = gradient + (weights if chunk < tokens else 0)
    return LossBytes(
        activations.hidden + weights,
        inputs + max(first, second) - weights,
        activations.hidden + weight_elements * size,
    )
