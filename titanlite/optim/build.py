"""The optimizer a section asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import nn

from titanlite.errors import ConfigError
from titanlite.optim.adam import LowMemoryAdam, StateDtype
from titanlite.optim.fp32_vectors import is_low_vector, updating_vectors_in_float32
from titanlite.optim.groups import parameter_groups
from titanlite.settings import Fraction, Range


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer] How gradients become updates."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"  # the algorithm; Adam adds decay to gradients
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    beta1: Fraction = 0.9  # decay of the first moment
    beta2: Fraction = 0.95  # decay of the second moment
    eps: Annotated[float, Range(0)] = 1e-8  # added to the root of the second moment
    weight_decay: Annotated[float, Range(0)] = 0.1  # pull towards zero, a share of the rate
    momentum: Fraction = 0.0  # of SGD
    no_decay: list[str] = field(default_factory=lambda: ["*norm.weight", "*bias"])
    # patterns of parameter names that weight decay leaves alone
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # kernels: one a parameter and operation, one an operation, one in all (SGD has the first two)
    early_step_in_backward: bool = False
    # update each parameter as soon as its gradient is there, and forget the gradient
    state_dtype: StateDtype = "float32"
    # type of the moments; float32: training.dtype; in 8 or 4 bits each block of 128 in a row has a
    # scale, and vectors stay float32
    offload: bool = False  # keep the moments in host memory; updates wait for them to travel

    @property
    def lean(self) -> bool:
        """Whether the moments are kept in less memory than torch's own optimizers keep them in."""
        return self.state_dtype != "float32" or self.offload


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimizer over the shards of a model."""
    groups = parameter_groups(model.named_parameters(), config.weight_decay, config.no_decay)
    low = any(is_low_vector(parameter) for parameter in model.parameters())
    kind = LowMemoryAdam if config.lean else getattr(torch.optim, config.name)
    kind = updating_vectors_in_float32(kind) if low else kind
    foreach, fused = config.implementation == "foreach", config.implementation == "fused"
    if config.name == "SGD":  # its fused kernel does not know sharded tensors (torch 2.13), and
        # planning a foreach over three mesh dimensions takes DTensor seconds at the first step
        return kind(groups, lr=config.lr, momentum=config.momentum, foreach=foreach)
    betas = (config.beta1, config.beta2)
    if config.lean:
        return kind(
            groups,
            lr=config.lr,
            betas=betas,
            eps=config.eps,
            decoupled=config.name == "AdamW",
            kind=config.state_dtype,
            host=config.offload,
            compiled=fused,
        )
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, foreach=foreach, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def check_optimizer_config(config: OptimizerConfig, keep: str) -> Iterator[ConfigError]:
    """Moments that the optimizer has not, or that would not move; `keep`: training.dtype."""
    yield from _frozen_moments(config, keep)
    if not config.lean:
        return
    asked = [f'state_dtype = "{config.state_dtype}"'] if config.state_dtype != "float32" else []
    asked += ["offload = true"] if config.offload else []
    keys = tuple(f"optimizer.{words.split()[0]}" for words in asked)
    wish = f"optimizer.{' and '.join(asked)}"
    if config.name == "SGD":
        yield ConfigError(
            f"{wish}: is about the moments of AdamW and Adam, and optimizer.name is SGD.",
            fix="Leave it out, or use AdamW.",
            keys=(*keys, "optimizer.name"),
        )
    if config.implementation == "foreach":
        yield ConfigError(
            f'{wish}: is built one parameter at a time, and optimizer.implementation = "foreach".',
            fix='Use "fused" (a compiled kernel a parameter), or "for-loop".',
            keys=(*keys, "optimizer.implementation"),
        )


def _frozen_moments(config: OptimizerConfig, keep: str) -> Iterator[ConfigError]:
    """Moments in bfloat16 whose change in a step is less than half of their last digit."""
    by_weights = config.state_dtype == "float32" and keep == "bfloat16"  # of the weights' type
    if not by_weights and config.state_dtype != "bfloat16":
        return
    source = "training.dtype" if by_weights else "optimizer.state_dtype"
    fix = 'optimizer.state_dtype = "8bit", whose scales are float32.'
    if config.name == "SGD":
        fix = 'training.dtype = "float32".'
    most = 1 - torch.finfo(torch.bfloat16).eps / 2
    for key in ("momentum",) if config.name == "SGD" else ("beta1", "beta2"):
        if (beta := getattr(config, key)) > most:
            yield ConfigError(
                f'optimizer.{key} = {beta:g}: with {source} = "bfloat16" moments are bfloat16, which'
                f" cannot move by so little as {1 - beta:g} of itself.",
                fix=f"Use at most {most:g}, or {fix}",
                keys=(f"optimizer.{key}", source),
            )
