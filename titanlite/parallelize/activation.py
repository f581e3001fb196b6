"""Activation checkpointing: forget what a block computed, and compute it again in backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from titanlite.errors import ConfigError
from titanlite.settings import Built, Share


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint] Less memory for activations, more computing."""

    mode: Annotated[
        Literal["selective", "full", "memory_budget", "none"],
        Built(("selective", "full", "none"), 'The mode "memory_budget"'),
    ] = "selective"  # which blocks are computed again in backward
    selective_ac_option: str = "2"  # under selective: every how many blocks
    per_op_sac_force_recompute_mm_shapes_by_fqns: Annotated[
        list[str], Built((["moe.router.gate"], []), "Recomputing per operation")
    ] = field(default_factory=lambda: ["moe.router.gate"])
    # under "op": linear layers whose products are always computed again
    early_stop: bool = False  # stop computing again once all that is needed is there
    memory_budget: Annotated[Share, Built((0.5,), "A memory budget")] = 0.5
    # share of the activations that may stay
    visualize_memory_budget_pareto: Annotated[bool, Built((False,), "A memory budget")] = False
    # draw memory against time
    preserve_rng_state: bool = False  # draw the same random numbers again; nothing here draws any
    determinism_check: Literal["default", "none"] = "default"  # compare shapes computed twice
    debug: bool = False  # keep the trace of both computations for the error message


def recompute_activations(blocks: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Let every block, or every k-th, keep only its input for the backward pass."""
    if config.mode == "none":
        return
    every = 1 if config.mode == "full" else int(config.selective_ac_option)
    for number, block in blocks.items():
        if int(number) % every == 0:
            block.forward = partial(_recomputed, block.forward, config)


def _recomputed(forward, config: ActivationCheckpointConfig, *inputs):
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
        early_stop=config.early_stop,
        debug=config.debug,
    )


def activation_problems(config: ActivationCheckpointConfig) -> Iterator[ConfigError]:
    """A selective option that is not a number of blocks."""
    option = config.selective_ac_option
    if config.mode == "selective" and not (option.isdigit() and int(option) > 0):
        yield ConfigError(
            f'activation_checkpoint.selective_ac_option = "{option}": must be a number of blocks'
            ' such as "2"; per operation ("op") is not available in this version.',
            keys=("activation_checkpoint.selective_ac_option",),
        )
