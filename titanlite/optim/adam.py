"""Adam and AdamW: torch's own kernels, or `low_memory.py` for moments that take less memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from titanlite.optim.low_memory import LowMemoryAdam, MomentOptions, StateDtype, moment_bytes
from titanlite.optim.mup import elementwise_update
from titanlite.optim.recipe import OptimizerKeys, OptimizerRecipe
from titanlite.settings import Fraction, Range


@dataclass(frozen=True)
class AdamRuleKeys(OptimizerKeys):
    """Adam's rule, which also updates what Muon and SOAP leave."""

    beta1: Fraction = 0.9  # decay rate of the first moment
    beta2: Fraction = 0.95  # decay rate of the second moment; SOAP: and of its statistics
    eps: Annotated[float, Range(0)] = 1e-8  # added to the root of the second moment
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # for-loop: a kernel per operation per parameter; foreach: one per operation; fused: one in all


@dataclass(frozen=True)
class AdamWKeys(AdamRuleKeys):
    """AdamW's keys of [optimizer]."""

    early_step_in_backward: bool = False
    # update each parameter in backward, as soon as its gradient is complete, and free the gradient
    state_dtype: StateDtype = "float32"
    # dtype of the moments; float32: same as training.dtype; 8bit, 4bit and float8: one scale per
    # block of up to 128 elements of a row; float32 for vectors, and rows that 32 does not divide
    offload: bool = False
    # store the moments in host memory; every step copies them to the GPU and back
    offload_folder: str = ""
    # with offload: store them in a folder on a local disk; every step reads and writes them

    decoupled: ClassVar[bool] = True  # weight decay: AdamW's, not Adam's

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options: dict[str, Any] = {"lr": lr, "betas": (self.beta1, self.beta2), "eps": self.eps}
        foreach, fused = self.implementation == "foreach", self.implementation == "fused"
        if self.state_dtype != "float32" or self.offload:
            moments = MomentOptions(self.state_dtype, self.offload, self.offload_folder, fused)
            optimizer_class: type[torch.optim.Optimizer] = LowMemoryAdam
            options |= {"decoupled": self.decoupled, "moments": moments}
        elif fused:
            optimizer_class = ConditionalAdamW if self.decoupled else ConditionalAdam
            options |= {"fused": True}
        else:
            optimizer_class = torch.optim.AdamW if self.decoupled else torch.optim.Adam
            options |= {"foreach": foreach, "fused": False}
        return OptimizerRecipe(
            optimizer_class,
            options,
            state_bytes=partial(_adam_state_bytes, self.state_dtype, self.offload),
            moment_rates=("beta1", "beta2"),
            mup_rule=elementwise_update,
        )


@dataclass(frozen=True)
class AdamKeys(AdamWKeys):
    """Adam's keys of [optimizer]."""

    decoupled: ClassVar[bool] = False


def _adam_state_bytes(
    dtype: StateDtype, offload: bool, shape: torch.Size, param_bytes: int
) -> float:
    if offload:
        return 0.0
    if dtype == "float32":  # as the weights
        return 2 * shape.numel() * param_bytes
    return moment_bytes(shape, dtype)


class _FusedConditional(torch.optim.Optimizer):
    """Mixin for torch's fused optimizers, whose kernels read what torch's GradScaler would set."""

    found_inf: Tensor | None = None  # 1: write nothing, and count no step
    grad_scale: Tensor | None = None  # divide the gradients by it, and write them too

    def step_scaled(self, accept: Tensor | None, grad_factor: Tensor | None) -> None:
        self.found_inf = None if accept is None else (~accept).float()
        self.grad_scale = None if grad_factor is None else grad_factor.reciprocal()
        try:
            self.step()
        finally:
            self.found_inf = self.grad_scale = None


class ConditionalAdamW(_FusedConditional, torch.optim.AdamW):
    """torch's AdamW; requires `fused=True`."""


class ConditionalAdam(_FusedConditional, torch.optim.Adam):
    """torch's Adam; requires `fused=True`."""
