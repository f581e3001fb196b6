"""Orthogonalization of matrices by matmuls only: a Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

# The polynomials a x + b x^3 + c x^5 of Polar Express (https://arxiv.org/abs/2505.16932), applied
# to the singular values one after the other. Together they map [0.001, 1] close to 1: the largest
# error is 0.12. Computed by the authors' algorithm.
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

    U V^T for a matrix U S V^T, in its dtype. Singular values below 0.001 times the Frobenius norm
    stay below 1. A matrix of zeros stays zero. The result does not depend on the matrix's scale.
    """
    transpose = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if transpose else matrices
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    # Norms of rows first: a CPU adds the squares one after the other (optim/clip.py).
    rows = torch.linalg.vector_norm(matrices, dim=-1, keepdim=True, dtype=dtype)
    norm = torch.linalg.vector_norm(rows, dim=-2, keepdim=True)
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
