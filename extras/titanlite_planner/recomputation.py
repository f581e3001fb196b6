"""What activation checkpointing stores, and the FLOPs that it repeats."""

from __future__ import annotations

from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.model_shape import block_flops, block_matmul_weights, flops_per_token
from titanlite_planner.workload import Workload


def stored_bytes_per_token(workload: Workload) -> float:
    """Bytes that a block stores on a rank for each token of its micro-batch; mean of all blocks."""
    activations, blocks = BlockActivations(workload), workload.model.n_layers
    return sum(map(activations.saved, range(blocks))) / blocks / activations.tokens


def repeated_flops(workload: Workload) -> float:
    """FLOPs that backward repeats, as a fraction of those of a step without recomputation."""
    total = sum(_repeated_of_block(workload, block) for block in range(workload.model.n_layers))
    return total / flops_per_token(workload.model, workload.seq_len)


def _repeated_of_block(workload: Workload, block: int) -> float:
    model, activations = workload.model, BlockActivations(workload)
    forward = block_flops(model, block, workload.seq_len) / 3
    matmuls = 2 * block_matmul_weights(model, block, active_only=True)
    if workload.recompute == "attention":
        return forward - matmuls
    if not activations.recomputes(block):
        return 0.0
    if workload.recompute == "per_operation":
        return matmuls / 2
    if workload.recompute == "memory_budget":  # the compiler selects what repeats the fewest
        return activations.of_block(block).recomputed_beyond_pointwise * forward
    return forward


def describe_recomputation(workload: Workload) -> str:
    """A line for people: what is stored and repeated."""
    return (
        f"activations: a block stores {stored_bytes_per_token(workload):,.0f} bytes a token;"
        f" recomputation adds {repeated_flops(workload):.1%} to the FLOPs of a step"
    )
