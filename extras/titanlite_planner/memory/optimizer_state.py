"""Bytes and FLOPs of optimizers, by their recipes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from titanlite.optim import MatrixFacts, OptimizerConfig, recipe_of_parameter
from titanlite.optim.owned_matrices import ROUND_ELEMENTS
from titanlite.optim.recipe import StateBytes


def optimizer_state_bytes(
    shapes: Iterable[tuple[str, torch.Size]],
    config: OptimizerConfig,
    param_dtype: torch.dtype,
    facts: MatrixFacts | None = None,
) -> float:
    """Bytes of the state in device memory; `shapes`: (name, global shape) of parameters."""
    total = 0.0
    for name, shape in shapes:
        recipe = recipe_of_parameter(name, shape, config, facts)
        total += _parameter_state_bytes(recipe.state_bytes, shape, param_dtype)
    return total


def owner_flops(name: str, shape: torch.Size, config: OptimizerConfig, facts: MatrixFacts) -> float:
    """FLOPs of the update of a parameter whose state is on one rank; 0: every rank has a shard."""
    flops = recipe_of_parameter(name, shape, config, facts).owner_flops
    return flops(shape) if flops else 0.0


def whole_matrix_bytes(
    shapes: Iterable[tuple[str, torch.Size]], config: OptimizerConfig, facts: MatrixFacts
) -> float:
    """Approximate bytes of the unsharded matrices that a rank has in a step of Muon or SOAP."""
    sizes = [
        shape.numel()
        for name, shape in shapes
        if recipe_of_parameter(name, shape, config, facts).hidden_only
    ]
    # 6 = received and sent matrices, each of the two rounds in flight (owned_matrices.py), and two
    # temporaries of `orthogonalize`
    return (
        6 * facts.compute_dtype.itemsize * min(sum(sizes), max(ROUND_ELEMENTS, *sizes))
        if sizes
        else 0.0
    )


def _parameter_state_bytes(state_bytes: StateBytes, shape: torch.Size, dtype: torch.dtype) -> float:
    """Bytes of the state of a parameter; low-precision vectors have a float32 copy."""
    if len(shape) > 1 or dtype not in (torch.bfloat16, torch.float16):
        return state_bytes(shape, dtype.itemsize)
    return state_bytes(shape, 4) + 4 * shape.numel()
