"""Bytes of the output layer and its loss."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite_planner.memory.activations import BlockActivations


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the output layer and the loss of one micro-batch."""

    saved: float = 0.0  # between forward and backward
    forward_temporaries: float = 0.0
    backward_temporaries: float = 0.0


def loss_bytes(activations: BlockActivations, weight_elements: int) -> LossBytes:
    """The bytes of the workload's kind of loss."""
    logits = activations.tokens * activations.workload.model.vocab_size
    logits /= activations.workload.layout.tensor
    if activations.workload.loss == "pytorch":
        return _pytorch_loss(activations, logits)
    size = activations.size
    if activations.workload.loss == "flash":  # the logits, and their gradient
        return LossBytes(activations.hidden + logits * size, 0.0, logits * size)
    if activations.workload.loss == "megatron":  # the logits, and their softmax in fp32
        return LossBytes(logits * (size + 4), logits * 4, logits * size)
    return _fused_loss(activations, weight_elements)


def _pytorch_loss(activations: BlockActivations, logits: float) -> LossBytes:
    """F.cross_entropy of logits that are cast to fp32; saves their log-softmax.

    Backward has the gradient of that and its product with the softmax. On tensor ranks, DTensor
    computes both of elementary operations, which have one fp32 tensor more each
    (torch/distributed/tensor/parallel/loss.py).
    """
    more = 4 if activations.workload.layout.tensor > 1 else 0
    saved = activations.hidden + 4 * logits
    return LossBytes(saved, (activations.size + 4 + more) * logits, (8 + more) * logits)


def _fused_loss(activations: BlockActivations, weight_elements: int) -> LossBytes:
    """The loss of titanlite: gradients are computed in forward, chunk by chunk."""
    workload, size = activations.workload, activations.size
    vocabulary = workload.model.vocab_size / workload.layout.tensor
    tokens = activations.tokens
    chunk = min(tokens, workload.loss_chunk_tokens or tokens)
    # the normed hidden states; tensor ranks have their shard as well
    inputs = activations.hidden + (activations.residual if workload.layout.tensor > 1 else 0.0)
    # compiled kernels overwrite the logits; separate operators need a copy in fp32
    cast = 4 if size < 4 and not workload.compiled else 0
    sum_size = 4 if chunk < tokens else size
    weights = weight_elements * sum_size
    logits = chunk * vocabulary * (size + cast)
    first = logits + (weights if chunk < tokens else 0)
    second = chunk * vocabulary * size + weights
    if activations.on_cpu and chunk < tokens:  # its matmuls do not add to the sum
        second += weight_elements * size + (weights if size < 4 else 0)
    return LossBytes(
        activations.hidden + weights,
        inputs + max(first, second) - weights,
        activations.hidden + weight_elements * size,
    )
