"""Activation checkpointing: forget what a block computed, and compute it again in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch._functorch.config  # torch does not bring it by itself
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from titanlite.errors import ConfigError
from titanlite.settings import Fraction

aten = torch.ops.aten


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint] Less memory for activations, more computing."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    # what is computed again in backward: some, all, as much as the compiler likes, nothing
    selective_ac_option: str = "2"
    # under selective: every how many blocks, or "op": in every block all but attention and every
    # second matrix product
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )  # under "op": linear layers, by a part of their name, that are always computed again
    early_stop: bool = False  # stop computing again once all that is needed is there
    memory_budget: Fraction = 0.5  # under memory_budget: share of the activations that may stay
    visualize_memory_budget_pareto: bool = False
    # under memory_budget: draw memory against time, in memory_budget_pareto/ of job.dump_folder
    offload: bool = False  # keep in host memory what is saved, and fetch it ahead of backward
    preserve_rng_state: bool = False  # draw the same random numbers again; nothing here draws any
    determinism_check: Literal["default", "none"] = "default"  # compare shapes computed twice
    debug: bool = False  # keep the trace of both computations for the error message

    def __str__(self) -> str:
        how = {
            "none": "nothing",
            "full": "every block",
            "memory_budget": f"as the compiler likes, to keep {self.memory_budget:g}",
            "selective": f"one block of {self.selective_ac_option}",
        }[self.mode]
        how = (
            "in every block, but attention and every second product" if self.per_operation else how
        )
        return f"{how}; what is saved waits in host memory" if self.offload else how

    @property
    def per_operation(self) -> bool:
        return self.mode == "selective" and self.selective_ac_option == "op"


def checkpoint_blocks(blocks: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Let every block, or every k-th, keep only its input for the backward pass."""
    if config.mode not in ("full", "selective") or config.per_operation:
        return
    every = 1 if config.mode == "full" else int(config.selective_ac_option)
    for number, block in blocks.items():
        if int(number) % every == 0:
            block.forward = partial(_recomputed, block.forward, config, None)


def checkpoint_operations(blocks: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Let every block keep what is dear to compute for its size, and compute the rest again."""
    if not config.per_operation:
        return
    never_kept = config.per_op_sac_force_recompute_mm_shapes_by_fqns
    for block in blocks.values():
        contexts = partial(_contexts, _weight_shapes(block, never_kept))
        block.forward = partial(_recomputed, block.forward, config, contexts)


def set_memory_budget(config: ActivationCheckpointConfig) -> None:
    """Tell the compiler which share of the activations it may keep, in all that it compiles."""
    # No public way in torch 2.11 to 2.15; the compiler's documentation names this one.
    budget = config.memory_budget if config.mode == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget


def plot_memory_budgets(folder: Path) -> None:
    """Let the compiler draw, for every graph, what each budget costs in time."""
    folder.mkdir(parents=True, exist_ok=True)
    torch._functorch.config.visualize_memory_budget_pareto = True
    torch._functorch.config.memory_budget_pareto_dir = str(folder)


def _recomputed(forward, config: ActivationCheckpointConfig, contexts, *inputs):
    chosen = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
        early_stop=config.early_stop,
        debug=config.debug,
        **chosen,
    )


PRODUCTS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}
DEAR = {  # attention by any kernel, sums over ranks, and the scales of Float8: small, and dear
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "titanlite::attend_in_documents",
    "titanlite::attend_over_ranks",
    "_c10d_functional::reduce_scatter_tensor",
    "aten::max",
}


def _weight_shapes(block: nn.Module, parts_of_names: Sequence[str]) -> set[tuple[int, ...]]:
    """[in, out] of the linear layers whose name has one of these parts in it."""
    return {
        tuple(module.weight.shape)[::-1]
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and any(part in name for part in parts_of_names)
    }


def _contexts(never_kept: set[tuple[int, ...]]):
    """What a forward and its second computation run inside of."""
    seen: Counter[bool] = Counter()  # products so far, in the first and in the second computation

    def choose(context: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
        kept = operation.name().partition(".")[0] in DEAR
        if operation in PRODUCTS and tuple(inputs[1].shape) not in never_kept:
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def activation_problems(
    config: ActivationCheckpointConfig, compiled: bool
) -> Iterator[ConfigError]:
    """A selective option that is neither, or what `compiled` blocks alone can do."""
    mode, option = "activation_checkpoint.mode", config.selective_ac_option
    chosen = "activation_checkpoint.selective_ac_option"
    if config.mode == "selective" and option != "op" and not (option.isdigit() and int(option) > 0):
        yield ConfigError(
            f'{chosen} = "{option}": must be a number of blocks such as "2", or "op".',
            keys=(chosen,),
        )
    if config.mode == "memory_budget" and not compiled:
        yield ConfigError(
            f'{mode} = "memory_budget": it is the compiler that keeps to the budget, and blocks are'
            " not compiled.",
            fix='Set compile.enable = true with "model" among compile.components, or use another'
            " mode.",
            keys=(mode,),
        )
    if config.offload and config.per_operation:
        yield ConfigError(
            f'activation_checkpoint.offload = true with {chosen} = "op": torch keeps what "op"'
            " saves where it cannot be taken from.",
            fix='Use "full" or every k-th block with offload, or "op" without it.',
            keys=("activation_checkpoint.offload", chosen),
        )
    if config.visualize_memory_budget_pareto and config.mode != "memory_budget":
        yield ConfigError(
            "activation_checkpoint.visualize_memory_budget_pareto = true: there is nothing to draw"
            f' under {mode} = "{config.mode}".',
            fix=f'Use {mode} = "memory_budget".',
            keys=("activation_checkpoint.visualize_memory_budget_pareto", mode),
        )
