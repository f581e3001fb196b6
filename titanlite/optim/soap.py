"""SOAP (https://arxiv.org/abs/2409.11321): Adam in the eigenbasis of Shampoo's statistics.

One-sided, as in section 7 of the paper: only the smaller dimension of a matrix is rotated. The
statistics of the larger one have no full rank in the first steps, so rounding decides its
eigenvectors, and with them the update: in one process, in float64, gradients that differ by 1e-15
gave updates that differ by half. With the smaller one, updates differ about 50 times as much as
AdamW's (measured in docs/how-to/choose-an-optimizer.md).

Every matrix is updated by the rank that owns it, which has all of its state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.optim.adam import AdamRuleKeys
from titanlite.optim.conditional import write_if
from titanlite.optim.owned_matrices import WholeMatrixOptimizer
from titanlite.optim.recipe import OptimizerRecipe
from titanlite.settings import Positive


@dataclass(frozen=True)
class SOAPKeys(AdamRuleKeys):
    """SOAP's keys of [optimizer], and those of AdamW for the other parameters."""

    precondition_frequency: Positive = 10  # steps between two updates of the eigenbasis

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        options = {
            "lr": lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "precondition_frequency": self.precondition_frequency,
        }
        return OptimizerRecipe(
            SOAP, options, state_bytes=_soap_state_bytes, owner_flops=_soap_flops, hidden_only=True
        )


def _soap_state_bytes(shape: torch.Size, param_bytes: int) -> float:
    """Bytes of the state of a matrix: moments in fp32, statistics and eigenbasis in fp64."""
    return 4 * 2 * shape.numel() + 8 * 2 * min(shape) ** 2


def _soap_flops(shape: torch.Size) -> float:
    """FLOPs of one update, without the QR decompositions."""
    # the statistics; gradient and moment into the eigenbasis, and the update back
    return 4 * 2 * shape.numel() * min(shape)


class SOAP(WholeMatrixOptimizer):
    """One-sided SOAP for matrices, with decoupled weight decay.

    The first step only finds an eigenbasis. Later, a step of the QR algorithm updates it.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        precondition_frequency: int,
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)
        self._frequency = precondition_frequency
        for parameters, matrices, _ in self.owned:
            for index, parameter in enumerate(parameters):
                self.state[parameter] = {"step": torch.tensor(0.0)}
                if matrices.is_owned(index):
                    self.state[parameter] |= _soap_state(parameter)

    def flops(self, parameter: nn.Parameter) -> float:
        return _soap_flops(parameter.shape)

    def make_input_shard(self, parameter: nn.Parameter, accept: Tensor | None) -> Tensor:
        """Count a step; returns this rank's shard of the gradient."""
        assert parameter.grad is not None
        self.state[parameter]["step"] += 1
        return local_shard(parameter.grad).float()

    def compute(self, parameter: nn.Parameter, matrix: Tensor, accept: Tensor | None) -> Tensor:
        """Update the state of a matrix; returns the direction of its update."""
        state, group = self.state[parameter], self.group_of(parameter)
        step = state["step"].item() - 1  # updates; in host memory, so this does not wait
        columns_rotated = matrix.shape[0] >= matrix.shape[1]
        # From here on the columns are rotated.
        oriented = matrix if columns_rotated else matrix.T
        new, direction = _update_moments(state, oriented, step, group)
        if step == 0:
            new["basis"] = _eigenbasis(new["statistics"])
        elif step % self._frequency == 0:
            new["basis"], order = _refine_basis(state["basis"], new["statistics"])
            new["exp_avg_sq"] = new["exp_avg_sq"][:, order]
        for name, value in new.items():
            write_if(state[name], value, accept)
        return (direction if columns_rotated else direction.T).contiguous()

    def write_shard(self, parameter: nn.Parameter, result: Tensor, accept: Tensor | None) -> None:
        group, weight = self.group_of(parameter), local_shard(parameter)
        # the first step finds a basis and has no update, so no decay either
        is_update = self.state[parameter]["step"].item() > 1
        decayed = weight.float() * (1 - group["lr"] * group["weight_decay"] * is_update)
        write_if(weight, decayed - group["lr"] * result, accept)


def _soap_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state of a whole matrix, oriented so that its columns are rotated."""
    smaller, larger = sorted(parameter.shape)
    shapes = {
        "exp_avg": (larger, smaller),
        "exp_avg_sq": (larger, smaller),  # in the eigenbasis
        "statistics": (smaller, smaller),
        "basis": (smaller, smaller),  # its columns are eigenvectors
    }
    device = local_shard(parameter).device
    # The squares of the smallest singular values would be lost in fp32, and their eigenvectors.
    doubles = ("statistics", "basis")
    return {
        name: torch.zeros(
            shape, dtype=torch.float64 if name in doubles else torch.float32, device=device
        )
        for name, shape in shapes.items()
    }


def _update_moments(
    state: dict[str, Tensor], grad: Tensor, step: float, group: dict[str, Any]
) -> tuple[dict[str, Tensor], Tensor]:
    """(new state, direction of update number `step`); 0: no update, only new statistics."""
    beta1, beta2 = group["betas"]
    double = grad.double()
    statistics = torch.lerp(state["statistics"], double.T @ double, 1 - beta2)
    if step == 0:
        return {"statistics": statistics}, torch.zeros_like(grad)
    basis = state["basis"].float()
    moment = torch.lerp(state["exp_avg"], grad, 1 - beta1)
    square = torch.lerp(state["exp_avg_sq"], (grad @ basis).square(), 1 - beta2)
    root = (square / (1 - beta2**step)).sqrt() + group["eps"]
    direction = (moment @ basis / (1 - beta1**step) / root) @ basis.T
    return {"statistics": statistics, "exp_avg": moment, "exp_avg_sq": square}, direction


def _eigenbasis(statistics: Tensor) -> Tensor:
    """Eigenvectors of a symmetric matrix, those of the largest eigenvalues first."""
    # The decomposition raises an error if it meets inf or NaN, which a rejected step may have.
    finite = statistics.nan_to_num(0.0, 0.0, 0.0)
    return torch.linalg.eigh(finite).eigenvectors.flip(1)


def _refine_basis(basis: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """(basis after one step of the QR algorithm, columns of the old one in their new order)."""
    product = statistics @ basis
    eigenvalues = (basis * product).sum(0)
    order = eigenvalues.argsort(descending=True)
    return torch.linalg.qr(product[:, order]).Q, order
