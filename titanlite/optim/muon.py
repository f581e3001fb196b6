"""Muon: momentum, orthogonalized, for the matrices inside the blocks of a model.

Each matrix or expert is orthogonalized whole, by one rank. Momentum and weights stay sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.optim.adam import AdamRuleKeys, StateDtype
from titanlite.optim.conditional import write_if
from titanlite.optim.mup import orthogonal_update
from titanlite.optim.owned_matrices import WholeMatrixOptimizer
from titanlite.optim.recipe import MatrixFacts, OptimizerRecipe, one_moment
from titanlite.optim.shards import sharded_zeros
from titanlite.settings import Fraction

# The polynomials a x + b x^3 + c x^5 of Polar Express (https://arxiv.org/abs/2505.16932), applied
# to the singular values one after the other: the first five of the paper's. Together they map
# [0.001, 1] close to 1: the largest error is 0.12, with the safety factor 0.16.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
# The input of each polynomial is divided by this factor, because rounding to bfloat16 can push
# singular values out of the interval that the polynomial is for (section 4.4 of the paper).
SAFETY_FACTOR = 1.01
_STEPS = [
    (a / SAFETY_FACTOR, b / SAFETY_FACTOR**3, c / SAFETY_FACTOR**5) for a, b, c in POLAR_EXPRESS
]


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximately the nearest semi-orthogonal matrix to each of `matrices`: [m, n] or [B, m, n].

    U V^T for a matrix U S V^T, in its dtype and whatever its scale. A singular value of 0.001 times
    the Frobenius norm becomes 0.84; smaller ones become less. A matrix of zeros stays zero.
    """
    transpose = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if transpose else matrices
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    # Norms of rows first: a CPU adds the squares one after the other (optim/clip.py).
    rows = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=dtype)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
    # the norm times the safety factor, too, as in the paper's code
    x = (wide / (norm * SAFETY_FACTOR).clamp(min=torch.finfo(dtype).tiny)).to(matrices.dtype)
    for a, b, c in _STEPS:
        gram = x @ x.mT
        polynomial = _add_matmul(gram, gram, gram, b, c)
        x = _add_matmul(x, polynomial, x, a, 1.0)
    return x.mT if transpose else x


def orthogonalization_flops(rows: int, columns: int) -> float:
    """FLOPs of the matmuls of `orthogonalize` for one matrix."""
    short, long = sorted((rows, columns))
    return len(_STEPS) * (4.0 * short**2 * long + 2.0 * short**3)


def _add_matmul(addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * addend + alpha * left @ right, in one kernel."""
    add = torch.addmm if addend.dim() == 2 else torch.baddbmm
    return add(addend, left, right, beta=beta, alpha=alpha)


HEAD_ROWS = "head_rows"  # keys in a parameter group: see `Muon`
COMPUTE_DTYPE = "compute_dtype"
MOMENTUM = "momentum_buffer"  # key in the state
UPDATE_RMS = 0.2  # of the elements of an update, as AdamW's (Moonlight, section 2.2)


@dataclass(frozen=True)
class MuonKeys(AdamRuleKeys):
    """Muon's keys of [optimizer], and those of AdamW for the other parameters."""

    muon_momentum: Fraction = 0.95  # decay rate of the momentum
    muon_per_head: bool = False
    # orthogonalize the rows of each head of the query, key and value projections separately
    state_dtype: StateDtype = "float32"
    # dtype of the momentum, and of AdamW's moments: float32, same as training.dtype; or bfloat16

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        dtype = torch.bfloat16 if self.state_dtype == "bfloat16" else None

        def parameter_options(name: str, facts: MatrixFacts) -> dict[str, Any]:
            rows = facts.head_rows(name) if self.muon_per_head else 0
            return {HEAD_ROWS: rows, COMPUTE_DTYPE: facts.compute_dtype}

        return OptimizerRecipe(
            Muon,
            {"lr": lr, "momentum": self.muon_momentum, "state_dtype": dtype},
            state_bytes=one_moment if dtype is None else lambda shape, _: 2.0 * shape.numel(),
            moment_rates=("muon_momentum",),
            hidden_only=True,
            parameter_options=parameter_options,
            # per head there is none: its rows do not grow with the width, as those of a matrix do
            mup_rule=None if self.muon_per_head else orthogonal_update,
        )


class Muon(WholeMatrixOptimizer):
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
        for parameter in (p for group in self.param_groups for p in group["params"]):
            zeros = sharded_zeros(parameter, state_dtype or parameter.dtype)
            self.state[parameter] = {MOMENTUM: zeros}

    def exchange_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """bfloat16, as published, on a GPU that computes the model in it, otherwise float32.

        Rounded to bfloat16, the small differences of two layouts' gradients grow. So a float32 run,
        whose layouts should agree to rounding, uses float32 here too. CPUs are faster in float32.
        """
        compute_dtype = self.group_of(parameter)[COMPUTE_DTYPE]
        in_bfloat16 = parameter.is_cuda and compute_dtype == torch.bfloat16
        return torch.bfloat16 if in_bfloat16 else torch.float32

    def flops(self, parameter: nn.Parameter) -> float:
        shape = self._matrix_shape(parameter)
        return parameter.numel() // math.prod(shape) * orthogonalization_flops(*shape)

    def make_input_shard(self, parameter: nn.Parameter, accept: Tensor | None) -> Tensor:
        """Update this rank's shard of the momentum; returns its shard of Nesterov's momentum."""
        assert parameter.grad is not None
        grad, decay = local_shard(parameter.grad).float(), self.group_of(parameter)["momentum"]
        stored = local_shard(self.state[parameter][MOMENTUM])
        momentum = torch.lerp(stored.float(), grad, 1 - decay)
        write_if(stored, momentum, accept)
        return torch.lerp(grad, momentum, decay).to(self.exchange_dtype(parameter))

    def compute(self, parameter: nn.Parameter, matrix: Tensor, accept: Tensor | None) -> Tensor:
        """Orthogonalize a matrix, each of its heads, or each matrix of a stack of experts."""
        # Matrices of the same shape are not batched: how a batch is computed can depend on their
        # number, which depends on the layout. The numbers of heads and of experts do not.
        if not self.group_of(parameter)[HEAD_ROWS]:
            return orthogonalize(matrix)
        heads = matrix.view(-1, *self._matrix_shape(parameter))
        return orthogonalize(heads).reshape(matrix.shape)

    def write_shard(self, parameter: nn.Parameter, result: Tensor, accept: Tensor | None) -> None:
        group, weight = self.group_of(parameter), local_shard(parameter)
        # a matrix with singular values of 1 gets an RMS of UPDATE_RMS
        scale = UPDATE_RMS * math.sqrt(max(self._matrix_shape(parameter)))
        decayed = weight.float() * (1 - group["lr"] * group["weight_decay"])
        write_if(weight, torch.add(decayed, result, alpha=-group["lr"] * scale), accept)

    def _matrix_shape(self, parameter: nn.Parameter) -> tuple[int, int]:
        """[rows, columns] of the matrices that are orthogonalized."""
        rows, columns = parameter.shape[-2:]
        return self.group_of(parameter)[HEAD_ROWS] or rows, columns
