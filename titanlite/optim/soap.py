"""SOAP (https://arxiv.org/abs/2409.11321): Adam in the eigenbasis of Shampoo's statistics.

One-sided, as in section 7 of the paper: only the smaller dimension of a matrix is rotated. The
statistics of the larger one have no full rank in the first steps, so rounding decides its
eigenvectors, and with them the update: in one process, in float64, gradients that differ by 1e-15
gave updates that differ by half. With the smaller one, updates differ about 50 times as much as
AdamW's (measured in docs/how-to/choose-an-optimizer.md).

Every matrix is updated by the rank that owns it, which has all of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.collectives import local_shard
from titanlite.optim.adam import AdamRuleKeys
from titanlite.optim.conditional import OverlappingBase, write_if
from titanlite.optim.owned_matrices import OwnedMatrices, WholeMatrixUpdate
from titanlite.optim.recipe import OptimizerRecipe
from titanlite.settings import Positive


@dataclass(frozen=True)
class SOAPKeys(AdamRuleKeys):
    """SOAP's keys of [optimizer], and those of AdamW for the other parameters."""

    precondition_frequency: Positive = 10  # steps between two updates of the eigenbasis

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        """See `OptimizerKeys`."""
        options = {
            "lr": lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "precondition_frequency": self.precondition_frequency,
        }
        return OptimizerRecipe(
            SOAP,
            options,
            state_bytes=_soap_state_bytes,
            owner_flops=_soap_flops,
            hidden_only=True,
        )


def _soap_state_bytes(shape: torch.Size, param_bytes: int) -> float:
    """Bytes of the state of a matrix: moments in fp32, statistics and eigenbasis in fp64."""
    return 4 * 2 * shape.numel() + 8 * 2 * min(shape) ** 2


def _soap_flops(shape: torch.Size) -> float:
    """FLOPs of one update, without the QR decompositions."""
    # the statistics; gradient and moment into the eigenbasis, and the update back
    return 4 * 2 * shape.numel() * min(shape)


class SOAP(OverlappingBase):
    """One-sided SOAP for matrices, with decoupled weight decay.

    The first step only finds an eigenbasis, by eigendecomposition. Later bases come from one step
    of the QR algorithm, every `precondition_frequency` steps.
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
        self._owned: list[_SoapMatrices] = []
        by_mesh: dict[object, list[_SoapParameter]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                by_mesh.setdefault(mesh, []).append(_SoapParameter(parameter, number))
        for members in by_mesh.values():
            parameters = [member.parameter for member in members]
            matrices = OwnedMatrices(parameters, [_soap_flops(p.shape) for p in parameters])
            self._owned.append(_SoapMatrices(members, matrices))
            for index, parameter in enumerate(parameters):
                self.state[parameter] = {"step": torch.tensor(0.0)}
                if matrices.is_owned(index):
                    self.state[parameter] |= _soap_state(parameter)

    def begin_parts(self, accept: Tensor | None) -> list[Callable[[], None]]:
        """See `OverlappingBase.begin_parts`."""
        return [self._begin(owned, accept) for owned in self._owned]

    def _begin(self, owned: _SoapMatrices, accept: Tensor | None) -> Callable[[], None]:
        members = owned.members
        indices = [i for i, member in enumerate(members) if member.parameter.grad is not None]
        for index in indices:
            self.state[members[index].parameter]["step"] += 1
        update = WholeMatrixUpdate(
            read_shard=lambda i: members[i].grad,
            compute=lambda i, grad: self._compute(members[i], grad, accept),
            write_shard=lambda i, direction: self._write_weight(members[i], direction, accept),
            dtype=torch.float32,
        )
        return owned.matrices.begin(indices, update)

    def _compute(self, member: _SoapParameter, grad: Tensor, accept: Tensor | None) -> Tensor:
        """Update the state of a matrix; returns the direction of its update."""
        state, group = self.state[member.parameter], self.param_groups[member.group]
        step = state["step"].item() - 1  # updates; in host memory, so this does not wait
        columns_rotated = grad.shape[0] >= grad.shape[1]
        # From here on the columns are rotated.
        oriented = grad if columns_rotated else grad.T
        new, direction = _update_moments(state, oriented, step, group)
        if step == 0:
            new["basis"] = _eigenbasis(new["statistics"])
        elif step % self._frequency == 0:
            new["basis"], order = _refine_basis(state["basis"], new["statistics"])
            new["exp_avg_sq"] = new["exp_avg_sq"][:, order]
        for name, value in new.items():
            write_if(state[name], value, accept)
        return (direction if columns_rotated else direction.T).contiguous()

    def _write_weight(
        self, member: _SoapParameter, direction: Tensor, accept: Tensor | None
    ) -> None:
        group, weight = self.param_groups[member.group], local_shard(member.parameter)
        # the first step finds a basis and has no update, so no decay either
        is_update = self.state[member.parameter]["step"].item() > 1
        decayed = weight.float() * (1 - group["lr"] * group["weight_decay"] * is_update)
        write_if(weight, decayed - group["lr"] * direction, accept)


class _SoapParameter(NamedTuple):
    """A parameter and the index of its group, as loading a state replaces the groups."""

    parameter: nn.Parameter
    group: int

    @property
    def grad(self) -> Tensor:
        """This rank's shard of the gradient, in fp32."""
        assert self.parameter.grad is not None
        return local_shard(self.parameter.grad).float()


class _SoapMatrices(NamedTuple):
    """The parameters of one device mesh."""

    members: list[_SoapParameter]
    matrices: OwnedMatrices


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
