"""Activation checkpointing: discard activations in forward, recompute them in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch._functorch.config  # not imported by `import torch`
import torch.utils.checkpoint as checkpointing
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import CheckpointPolicy

from titanlite.errors import ConfigError
from titanlite.kernels import grouped  # noqa: F401  # which registers operators of MATMULS
from titanlite.models.router import find_routers, reuse_in_recomputation
from titanlite.settings import Fraction

aten = torch.ops.aten


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """[activation_checkpoint] Recompute activations in backward, to store fewer of them."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    # what is recomputed: some blocks or operations, every block, what the compiler selects, nothing
    selective_ac_option: str = "2"
    # under selective: recompute every k-th block, or "op": in every block, recompute all operations
    # except attention, cheap-to-store results and every second matmul
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    # under "op": always recompute matmuls of the same weight shape as a linear layer whose name
    # contains one of these
    memory_budget: Fraction = 0.5  # under memory_budget: fraction of the activations to store
    offload: bool = False  # store saved activations in host memory, prefetch them in backward
    offload_folder: str = ""  # with offload: store them in a folder on a local disk
    debug: bool = False  # show traces of forward and recomputation if their shapes differ

    def __str__(self) -> str:
        option = "1" if self.mode == "full" else self.selective_ac_option
        ordinal = {"1": "", "2": "2nd ", "3": "3rd "}.get(option, f"{option}-th ")
        text = f"every {ordinal}block; of it, only the input is stored"
        if self.mode == "none":
            text = "off; all activations are stored"
        elif self.mode == "memory_budget":
            text = f"norms and activations; more until {self.memory_budget:g} of a block is stored"
        elif self.per_operation:
            text = "in every block, all operations but attention and every 2nd matmul"
        if not self.offload:
            return text
        return f"{text}; stored activations are in {self.offload_folder or 'host memory'}"

    @property
    def per_operation(self) -> bool:
        """Whether individual operations are checkpointed, in place of blocks."""
        return self.mode == "selective" and self.selective_ac_option == "op"

    def recomputes(self, block: int) -> bool:
        """Whether the whole of block number `block` is recomputed."""
        by_block = self.mode == "selective" and not self.per_operation
        return self.mode == "full" or (by_block and block % int(self.selective_ac_option) == 0)


def checkpoint_blocks(blocks: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Save only the inputs of every block, or of every k-th block."""
    for number, block in blocks.items():
        if config.recomputes(int(number)):
            _checkpoint(block, config)


def checkpoint_operations(blocks: nn.ModuleDict, config: ActivationCheckpointConfig) -> None:
    """Save outputs that are expensive to recompute per byte; recompute the rest of each block."""
    if not config.per_operation:
        return
    names = config.per_op_sac_force_recompute_mm_shapes_by_fqns
    for block in blocks.values():
        recomputed_shapes = {  # [in, out]
            tuple(layer.weight.shape)[::-1]
            for path, layer in block.named_modules()
            if isinstance(layer, nn.Linear) and any(name in path for name in names)
        }
        contexts = partial(_save_contexts, recomputed_shapes)
        _checkpoint(block, config, context_fn=contexts)


def set_memory_budget(config: ActivationCheckpointConfig) -> None:
    """Set the fraction of activations that the compiler stores, for all that it compiles."""
    # No public API in torch 2.11 to 2.15; the compiler's documentation names this setting.
    budget = config.memory_budget if config.mode == "memory_budget" else 1.0
    torch._functorch.config.activation_memory_budget = budget
    # With TP, the mesh is an input of the graph. Torch 2.13 raises: it might hold activations.
    if hasattr(torch._functorch.config, "unsafe_treat_script_objects_as_zero_size"):
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True


def _checkpoint(block: nn.Module, config: ActivationCheckpointConfig, **more: Any) -> None:
    forward = block.forward
    checkpointed: Callable[..., Any] = partial(
        checkpointing.checkpoint,
        use_reentrant=False,
        preserve_rng_state=False,  # the models draw no random numbers
        early_stop=False,  # recompute whole blocks, as torchtitan does by default
        debug=config.debug,
        **more,
    )
    block.forward = partial(checkpointed, forward)
    if find_routers(block):
        block.forward = lambda *inputs: checkpointed(reuse_in_recomputation(forward), *inputs)


MATMULS = {  # operation -> position of the weight among its arguments
    aten.mm.default: 1,
    aten.addmm.default: 2,  # after the bias and the activation
    aten._scaled_mm.default: 1,
    aten._grouped_mm.default: 1,
    aten._scaled_grouped_mm_v2.default: 1,
    torch.ops.titanlite.grouped_matmul.default: 1,
}
SAVED_OPS = {  # cheap to store, expensive to recompute: attention, reductions, maxima for Float8
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "titanlite::attend_in_documents",
    "titanlite::attend_over_ranks",
    "titanlite::fla_delta_rule",
    "_c10d_functional::reduce_scatter_tensor",
    "aten::max",
}


def _save_contexts(recomputed_shapes: set[tuple[int, ...]]):
    """Contexts of the forward and of its recomputation; both select the same outputs to save."""
    matmuls: Counter[bool] = Counter()  # number so far in forward (False), recomputation (True)

    def policy(context: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
        save = operation.name().partition(".")[0] in SAVED_OPS
        if operation in MATMULS:
            weight = inputs[MATMULS[operation]]
            if tuple(weight.shape) not in recomputed_shapes:
                matmuls[context.is_recompute] += 1
                save = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpointing.create_selective_checkpoint_contexts(policy)


@contextmanager
def outside_saved_operations() -> Iterator[None]:
    """Save no output of an operation in this context, and do not count its operations.

    Torch matches the operations of the forward and of its recomputation by their number. FSDP
    groups inside of a checkpointed block run other operations in the recomputation.
    """
    # All of this is private (torch 2.11 to 2.15); there is no public way to leave a mode.
    modes = (checkpointing._CachingTorchDispatchMode, checkpointing._CachedTorchDispatchMode)
    if isinstance(_get_current_dispatch_mode(), modes):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def check_activation_checkpoint(
    config: ActivationCheckpointConfig, compiled: bool
) -> Iterator[ConfigError]:
    """Reject an invalid selective option, and combinations that torch does not support."""
    mode, option = "activation_checkpoint.mode", config.selective_ac_option
    option_key = "activation_checkpoint.selective_ac_option"
    if config.mode == "selective" and option != "op" and not (option.isdigit() and int(option) > 0):
        yield ConfigError(
            f'{option_key} = "{option}": must be a number of blocks such as "2", or "op".'
        )
    if config.mode == "memory_budget" and not compiled:
        yield ConfigError(
            f'{mode} = "memory_budget": only the compiler implements it, and blocks are not'
            " compiled.",
            fix='Set compile.enable = true, with "model" among compile.components.',
        )
    if config.offload and config.per_operation:
        yield ConfigError(
            f'activation_checkpoint.offload = true with {option_key} = "op": torch stores what "op"'
            " saves in its own cache, which cannot be offloaded.",
            fix=f"Set activation_checkpoint.offload = false, or {option_key} to a number.",
        )
