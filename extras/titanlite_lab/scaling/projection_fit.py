"""Least squares of L = E + A / N^alpha + B / D^beta by variable projection.

For given exponents the law is linear in E, A and B, which are found exactly, by non-negative least
squares. So only alpha and beta are searched for, and that problem is well conditioned
(arXiv:2603.22339). Many weightings of the points are solved at once: S of them, for bootstraps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titanlite_lab.scaling.log_sum_exp_fit import MAX_EXPONENT, MIN_EXPONENT

_GRID = np.geomspace(0.02, 2.0, 16)  # exponents that the search starts from
_STARTS = 8  # the best points of the grid, from which it continues
_ITERATIONS = 200
_CHUNK = 1 << 16  # weighted points that are computed together, to stay in the cache
_ACTIVE_SETS = [
    np.array(active) for active in itertools.product((False, True), repeat=3) if any(active)
]


@dataclass(frozen=True)
class ProjectionProblem:
    """Points in centred logarithms: x = log N - mean, z = log D - mean; arrays [n]."""

    x: np.ndarray
    z: np.ndarray
    losses: np.ndarray

    @cached_property
    def grid(self) -> np.ndarray:
        """Exponents to start from, [256, 2]."""
        return np.array(list(itertools.product(_GRID, _GRID)))

    def solve(self) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        """(coefficients [3], exponents [2], starts that reached this minimum and all starts)."""
        ones = np.ones((1, len(self.losses)))
        start = self.grid[np.argsort(self._evaluate(self.grid, ones)[2])[:_STARTS]]
        coefficients, exponents, objective = self.refine(start, ones)
        best = int(np.argmin(objective))
        near = np.all(np.abs(exponents - exponents[best]) < 1e-4, axis=1)
        return coefficients[best], exponents[best], (int(near.sum()), len(near))

    def refine(
        self, exponents: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Minimize from exponents [S, 2], weights [S or 1, n]; as `_refine_chunk`."""
        step = max(1, _CHUNK // len(self.losses))
        parts = []
        for first in range(0, len(exponents), step):
            chosen = slice(first, first + step)
            of_chunk = weights if len(weights) == 1 else weights[chosen]
            parts.append(self._refine_chunk(exponents[chosen], of_chunk))
        coefficients, found, objective = (np.concatenate(part) for part in zip(*parts, strict=True))
        return coefficients, found, objective

    def _refine_chunk(self, exponents: np.ndarray, weights: np.ndarray):
        """Levenberg-Marquardt with Kaufman's Jacobian: slopes minus what E, A, B explain of them.

        Returns (coefficients [S, 3], exponents [S, 2], weighted sums of squares [S]).
        """
        found, damping = exponents.copy(), np.full(len(exponents), 1e-3)
        coefficients, residuals, objective = self._evaluate(found, weights)
        active = np.arange(len(found))
        for _ in range(_ITERATIONS):
            chosen = weights if len(weights) == 1 else weights[active]
            now = found[active]
            normal, gradient = self._normal_equations(
                now, coefficients[active], residuals[active], chosen
            )
            diagonal = damping[active, None] * np.einsum("sii->si", normal) + 1e-300
            step = np.linalg.solve(normal + diagonal[..., None] * np.eye(2), gradient[..., None])
            trial = np.clip(now - step[..., 0], MIN_EXPONENT, MAX_EXPONENT)
            tried = self._evaluate(trial, chosen)
            better = tried[2] < objective[active]
            improved = active[better]
            found[improved] = trial[better]
            coefficients[improved], residuals[improved] = tried[0][better], tried[1][better]
            objective[improved] = tried[2][better]
            damping[active] = np.where(better, damping[active] / 5, damping[active] * 4)
            done = (np.abs(trial - now).max(1) < 1e-12) | (damping[active] > 1e12)
            active = active[~done]
            if not len(active):
                break
        return coefficients, found, objective

    def _columns(self, exponents: np.ndarray) -> np.ndarray:
        """The functions that E, A and B multiply, [S, 3, n]."""
        alpha, beta = exponents[:, :1], exponents[:, 1:]
        powers = np.exp(-alpha * self.x), np.exp(-beta * self.z)
        return np.stack([np.ones_like(powers[0]), *powers], axis=1)

    def _evaluate(self, exponents: np.ndarray, weights: np.ndarray):
        """(E, A and B of non-negative least squares [S, 3], residuals [S, n], sums of squares)."""
        columns = self._columns(exponents)
        weighted = columns * weights[:, None]
        gram, right = weighted @ columns.mT, weighted @ self.losses
        active = _nonnegative_set(gram, right)
        inverse = _masked_inverse(gram, active)
        solution = (inverse @ right[..., None])[..., 0]
        # solve once more for the residuals, which removes the rounding of the Gram matrix
        left = self.losses - (solution[:, None] @ columns)[:, 0]
        solution += (inverse @ (weighted @ left[..., None]))[..., 0]
        solution = solution.clip(0.0)
        left = self.losses - (solution[:, None] @ columns)[:, 0]
        return solution, left, (left**2 * weights).sum(1)

    def _normal_equations(self, exponents, coefficients, residuals, weights):
        """J^T W J [S, 2, 2] and J^T W r [S, 2] of the projected residuals."""
        columns = self._columns(exponents)
        weighted = columns * weights[:, None]
        inverse = _masked_inverse(weighted @ columns.mT, coefficients > 0)
        slopes = np.stack([self.x, self.z]) * columns[:, 1:] * coefficients[:, 1:, None]
        explained = inverse @ (weighted @ slopes.mT)
        jacobian = slopes - explained.mT @ columns  # of the residuals L - prediction
        return (jacobian * weights[:, None]) @ jacobian.mT, np.einsum(
            "skn,sn->sk", jacobian, residuals * weights
        )

    def objective(self, exponents: np.ndarray) -> float:
        """Sum of squares of the best E, A and B for exponents [2]."""
        return float(self._evaluate(exponents[None], np.ones((1, len(self.losses))))[2][0])

    def condition(self, exponents: np.ndarray) -> float:
        """Condition number of the Gauss-Newton matrix of alpha and beta, at exponents [2]."""
        ones = np.ones((1, len(self.losses)))
        coefficients, residuals, _ = self._evaluate(exponents[None], ones)
        normal, _ = self._normal_equations(exponents[None], coefficients, residuals, ones)
        return float(np.linalg.cond(normal[0]))


def _nonnegative_set(gram: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which unknowns are positive in the solution of non-negative least squares, [S, 3].

    Exact, by trying every set where the solution without constraints has a negative part.
    """
    best = np.ones(right.shape, dtype=bool)
    solution = (_masked_inverse(gram, best) @ right[..., None])[..., 0]
    rest = np.flatnonzero((solution < 0).any(1))
    gram, right = gram[rest], right[rest]
    explained = np.full(len(rest), -np.inf)  # of the sum of squares
    for active in _ACTIVE_SETS:
        inverse = _masked_inverse(gram, np.broadcast_to(active, right.shape))
        solution = (inverse @ right[..., None])[..., 0]
        gain = (solution * right).sum(1)
        better = (solution >= 0).all(1) & (gain > explained)
        best[rest[better]] = active
        explained[better] = gain[better]
    return best


def _masked_inverse(gram: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Inverse of the rows and columns of `active` [S, 3] of matrices [S, 3, 3]; 0 elsewhere."""
    pair = active[:, :, None] & active[:, None, :]
    identity = np.eye(gram.shape[-1])
    scale = 1 / np.sqrt(np.maximum(np.einsum("sii->si", gram), 1e-300))
    scaled = gram * scale[:, :, None] * scale[:, None, :]
    # columns that are equal, as when one size is drawn only, would make it singular
    inverse = np.linalg.inv(np.where(pair, scaled, identity) + 1e-13 * identity)
    return np.where(pair, inverse * scale[:, :, None] * scale[:, None, :], 0.0)
