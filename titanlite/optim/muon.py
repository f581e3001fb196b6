"""Muon: momentum, orthogonalized, for the matrices inside the blocks of a model.

Every matrix is orthogonalized whole, by the rank that owns it. Momentum, weights and their updates
stay sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.tensors import local_shard
from titanlite.optim.conditional import OverlappingBase
from titanlite.optim.newton_schulz import orthogonalization_flops, orthogonalize
from titanlite.optim.owned_matrices import OwnedMatrices, WholeMatrixUpdate
from titanlite.optim.shards import sharded_zeros, write_if

HEAD_ROWS = "head_rows"  # keys in a parameter group: see `Muon`
COMPUTE_DTYPE = "compute_dtype"
MOMENTUM = "momentum_buffer"  # key in the state
UPDATE_RMS = 0.2  # of the elements of an update, as AdamW's (Moonlight, section 2.2)


class Muon(OverlappingBase):
    """Muon (https://kellerjordan.github.io/posts/muon/) with Nesterov momentum.

    Its updates have the size of AdamW's, so it uses AdamW's learning rate and weight decay
    (Moonlight, https://arxiv.org/abs/2502.16982). Keys of a parameter group: `head_rows` is the
    number of rows that are orthogonalized separately, 0 for all together;
    `compute_dtype` is that of the model's matmuls.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        state_dtype: torch.dtype | None = None,  # None: as the weights
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0}
        super().__init__(groups, {**defaults, HEAD_ROWS: 0, COMPUTE_DTYPE: torch.float32})
        self._owned: list[_OwnedParameters] = []
        by_kind: dict[tuple, list[_MuonParameter]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                zeros = sharded_zeros(parameter, state_dtype or parameter.dtype)
                self.state[parameter] = {MOMENTUM: zeros}
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                member = _MuonParameter(parameter, number, group[HEAD_ROWS])
                by_kind.setdefault((mesh, _matmul_dtype(parameter, group)), []).append(member)
        for (_, dtype), members in by_kind.items():
            matrices = OwnedMatrices([m.parameter for m in members], [m.flops for m in members])
            self._owned.append(_OwnedParameters(members, matrices, dtype))

    def begin_parts(self, accept: Tensor | None) -> list[Callable[[], None]]:
        """See `OverlappingBase.begin_parts`."""
        return [self._begin(owned, accept) for owned in self._owned]

    def _begin(self, owned: _OwnedParameters, accept: Tensor | None) -> Callable[[], None]:
        members, dtype = owned.members, owned.dtype
        indices = [i for i, member in enumerate(members) if member.parameter.grad is not None]
        update = WholeMatrixUpdate(
            read_shard=lambda i: self._update_momentum(members[i], accept).to(dtype),
            compute=lambda i, matrix: members[i].orthogonalize(matrix),
            write_shard=lambda i, direction: self._update_weight(members[i], direction, accept),
            dtype=dtype,
        )
        return owned.matrices.begin(indices, update)

    def _update_momentum(self, member: _MuonParameter, accept: Tensor | None) -> Tensor:
        """Update this rank's shard of the momentum; returns its shard of Nesterov's momentum."""
        parameter, decay = member.parameter, self.param_groups[member.group]["momentum"]
        assert parameter.grad is not None
        grad, stored = local_shard(parameter.grad).float(), self._momentum_of(parameter)
        momentum = torch.lerp(stored.float(), grad, 1 - decay)
        write_if(stored, momentum, accept)
        return torch.lerp(grad, momentum, decay)

    def _momentum_of(self, parameter: nn.Parameter) -> Tensor:
        return local_shard(self.state[parameter][MOMENTUM])

    def _update_weight(
        self, member: _MuonParameter, direction: Tensor, accept: Tensor | None
    ) -> None:
        group, weight = self.param_groups[member.group], local_shard(member.parameter)
        lr, weight_decay = group["lr"], group["weight_decay"]
        decayed = weight.float() * (1 - lr * weight_decay)
        updated = torch.add(decayed, direction, alpha=-lr * member.scale)
        write_if(weight, updated, accept)


class _MuonParameter(NamedTuple):
    """A parameter and what its update depends on."""

    parameter: nn.Parameter
    group: int  # index of its parameter group, as loading a state replaces the groups
    head_rows: int  # rows that are orthogonalized separately; 0: all together

    @property
    def block_shape(self) -> tuple[int, int]:
        """[rows, columns] of the matrices that are orthogonalized."""
        rows, columns = self.parameter.shape
        return self.head_rows or rows, columns

    @property
    def flops(self) -> float:
        """FLOPs of one update."""
        blocks = self.parameter.shape[0] // self.block_shape[0]
        return blocks * orthogonalization_flops(*self.block_shape)

    @property
    def scale(self) -> float:
        """Factor that gives a matrix with singular values of 1 an RMS of UPDATE_RMS."""
        return UPDATE_RMS * math.sqrt(max(self.block_shape))

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        """The orthogonalized matrix [rows, columns], or each of its heads."""
        # Matrices of the same shape are not batched: how a batch is computed can depend on their
        # number, which depends on the layout. The number of heads does not.
        if not self.head_rows:
            return orthogonalize(matrix)
        heads = matrix.view(-1, *self.block_shape)
        return orthogonalize(heads).reshape(matrix.shape)


class _OwnedParameters(NamedTuple):
    """The parameters with one device mesh and one dtype of their matmuls."""

    members: Sequence[_MuonParameter]
    matrices: OwnedMatrices
    dtype: torch.dtype  # of what is sent and orthogonalized


def _matmul_dtype(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    """bfloat16, as published, on a GPU that computes the model in it, otherwise float32.

    Rounded to bfloat16, the small differences of two layouts' gradients grow. So a float32 run,
    whose layouts should agree to rounding, uses float32 here too. CPUs are faster in float32.
    """
    in_bfloat16 = parameter.is_cuda and group[COMPUTE_DTYPE] == torch.bfloat16
    return torch.bfloat16 if in_bfloat16 else torch.float32
