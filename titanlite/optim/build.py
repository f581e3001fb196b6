"""The optimizer a section asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import nn

from titanlite.optim.groups import parameter_groups
from titanlite.settings import Built, Range, Share


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer] How gradients become updates."""

    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"  # the algorithm; Adam adds decay to gradients
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    beta1: Share = 0.9  # decay of the first moment
    beta2: Share = 0.95  # decay of the second moment
    eps: Annotated[float, Range(0)] = 1e-8  # added to the root of the second moment
    weight_decay: Annotated[float, Range(0)] = 0.1  # pull towards zero, a share of the rate
    momentum: Share = 0.0  # of SGD
    no_decay: list[str] = field(default_factory=lambda: ["*norm.weight", "*bias"])
    # patterns of parameter names that weight decay leaves alone
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # kernels: one a parameter and operation, one an operation, one in all (SGD has the first two)
    early_step_in_backward: Annotated[bool, Built((False,), "Stepping in backward")] = False
    # update each parameter as soon as its gradient is there


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimizer over the shards of a model."""
    groups = parameter_groups(model.named_parameters(), config.weight_decay, config.no_decay)
    foreach, fused = config.implementation == "foreach", config.implementation == "fused"
    if config.name == "SGD":  # its fused kernel does not know sharded tensors (torch 2.13), and
        # planning a foreach over three mesh dimensions takes DTensor seconds at the first step
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=foreach)
    kind = torch.optim.AdamW if config.name == "AdamW" else torch.optim.Adam
    betas = (config.beta1, config.beta2)
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps, foreach=foreach, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
