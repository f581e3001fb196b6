"""Robust fit of log L = power * LSE(a - alpha * x, b - beta * z, e): Huber loss of log residuals.

The objective of Hoffmann et al. (arXiv:2203.15556, equation 3), minimized by a damped Newton method
from many starts at once. x and z are logarithms of N and D minus their means.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

HUBER_DELTA = 1e-3
MIN_EXPONENT, MAX_EXPONENT = 1e-3, 10.0  # of N and D
PARAMETERS = ("a", "alpha", "b", "beta", "e", "log_power")
_ITERATIONS = 300
_CHUNK = 1 << 15  # weighted points that are computed together, to stay in the cache


@dataclass(frozen=True)
class LogSumExpProblem:
    """Points in centred logarithms, arrays [n]; `kaplan`: no e, beta 1, the power is free."""

    x: np.ndarray
    z: np.ndarray
    log_losses: np.ndarray
    kaplan: bool = False
    delta: float = HUBER_DELTA

    @property
    def free(self) -> np.ndarray:
        """Which of PARAMETERS are searched for."""
        fixed = ("beta", "e") if self.kaplan else ("log_power",)
        return np.array([name not in fixed for name in PARAMETERS])

    @property
    def starts(self) -> np.ndarray:
        """[54, 6] (`kaplan`: [60, 6]) parameters that predict about the observed losses."""
        exponents, level = (0.2, 0.5, 1.0), float(np.median(self.log_losses))
        starts = []
        if self.kaplan:
            for alpha, power, share in itertools.product(
                (0.3, 0.6, 1.0, 1.5), (0.03, 0.1, 0.3), (0.1, 0.3, 0.5, 0.7, 0.9)
            ):
                a, b = level / power + np.log(share), level / power + np.log(1 - share)
                starts.append((a, alpha, b, 1.0, -np.inf, np.log(power)))
            return np.array(starts)
        floor = float(self.log_losses.min())
        for alpha, beta, share, part in itertools.product(
            exponents, exponents, (0.3, 0.6, 0.9), (0.3, 0.7)
        ):
            e = floor + np.log(share)
            rest = np.log(max(np.exp(level) - np.exp(e), 0.05))
            starts.append((rest + np.log(part), alpha, rest + np.log(1 - part), beta, e, 0.0))
        return np.array(starts)

    def solve(self) -> tuple[np.ndarray, float, tuple[int, int]]:
        """(parameters [6], objective, starts that reached this minimum and all starts)."""
        ones = np.ones((1, len(self.x)))
        found, objective = self.minimize(self.starts, ones)
        best = int(np.argmin(objective))
        near = objective < objective[best] * (1 + 1e-6) + 1e-15
        return found[best], float(objective[best]), (int(near.sum()), len(near))

    def minimize(self, theta: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Minimize from parameters [S, 6] under weights [S or 1, n]; (parameters, objectives)."""
        step = max(1, _CHUNK // len(self.x))
        parts = []
        for first in range(0, len(theta), step):
            chosen = slice(first, first + step)
            of_chunk = weights if len(weights) == 1 else weights[chosen]
            parts.append(self._minimize_chunk(theta[chosen], of_chunk))
        return np.concatenate([part[0] for part in parts]), np.concatenate([p[1] for p in parts])

    def objective(self, theta: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum of the Huber losses of parameters [S, 6]."""
        weights = np.ones((1, len(self.x))) if weights is None else weights
        size = np.abs(self._residuals(theta))
        huber = np.where(size <= self.delta, size**2 / 2, self.delta * (size - self.delta / 2))
        return (huber * weights).sum(1)

    def _terms(self, theta: np.ndarray) -> np.ndarray:
        a, alpha, b, beta, e = (column[:, None] for column in theta.T[:5])
        return np.stack([a - alpha * self.x, b - beta * self.z, e + 0 * self.x], axis=1)

    def _residuals(self, theta: np.ndarray) -> np.ndarray:
        """log L minus the prediction, [S, n]."""
        terms = self._terms(theta)
        top = terms.max(1)
        total = top + np.log(np.exp(terms - top[:, None]).sum(1))
        return self.log_losses - np.exp(theta[:, 5:]) * total

    def _minimize_chunk(self, theta: np.ndarray, weights: np.ndarray):
        theta = theta.copy()
        damping = np.full(len(theta), 1e-1)
        objective, active = self.objective(theta, weights), np.arange(len(theta))
        for _ in range(_ITERATIONS):
            now = theta[active]
            chosen = weights if len(weights) == 1 else weights[active]
            step, predicted = self._newton_step(now, chosen, damping[active])
            trial = now + step
            trial[:, [1, 3]] = trial[:, [1, 3]].clip(MIN_EXPONENT, MAX_EXPONENT)
            tried = self.objective(trial, chosen)
            better = tried < objective[active]
            theta[active[better]] = trial[better]
            objective[active[better]] = tried[better]
            damping[active] = np.where(better, damping[active] / 4, damping[active] * 6)
            damping = damping.clip(1e-14, 1e14)
            done = (predicted < 1e-13 * objective[active] + 1e-30) | (damping[active] >= 1e13)
            active = active[~done]
            if not len(active):
                break
        return theta, objective

    def _newton_step(self, theta: np.ndarray, weights: np.ndarray, damping: np.ndarray):
        """(step [S, 6], decrease that it predicts [S]); the Hessian is made positive."""
        gradient, hessian, majorizer = self._derivatives(theta, weights)
        scale = 1 / np.sqrt(majorizer + 1e-12 * majorizer.max(1, keepdims=True) + 1e-300)
        scale *= self.free
        values, vectors = np.linalg.eigh(hessian * scale[:, :, None] * scale[:, None, :])
        along = (vectors.mT @ (gradient * scale)[..., None])[..., 0]
        along /= np.abs(values) + damping[:, None]
        predicted = np.einsum("si,si->s", along**2, np.abs(values) + damping[:, None])
        return -scale * (vectors @ along[..., None])[..., 0], predicted

    def _derivatives(self, theta: np.ndarray, weights: np.ndarray):
        """Gradient [S, 6], Hessian [S, 6, 6] and the diagonal of a quadratic upper bound [S, 6]."""
        terms = self._terms(theta)
        top = terms.max(1)
        shares = np.exp(terms - top[:, None])
        total = shares.sum(1)
        shares /= total[:, None]
        lse, power = top + np.log(total), np.exp(theta[:, 5:])
        residuals = self.log_losses - power * lse
        pa, pb, pe = shares[:, 0], shares[:, 1], shares[:, 2]
        # derivatives of the predicted log L, divided by the power
        slopes = np.stack([pa, -pa * self.x, pb, -pb * self.z, pe, lse], axis=1)
        psi = weights * np.clip(residuals, -self.delta, self.delta)
        inside = weights * (np.abs(residuals) <= self.delta)
        pull = power * psi
        gradient = -np.einsum("sn,skn->sk", pull, slopes)
        inner = slopes.copy()
        inner[:, 5] = 0.0
        hessian = (slopes * (power**2 * inside)[:, None]) @ slopes.mT
        hessian += (inner * pull[:, None]) @ inner.mT
        second = {(0, 0): pa, (0, 1): -pa * self.x, (1, 1): pa * self.x**2}
        second |= {(2, 2): pb, (2, 3): -pb * self.z, (3, 3): pb * self.z**2, (4, 4): pe}
        second |= {(k, 5): slopes[:, k] for k in range(6)}
        for (row, column), term in second.items():
            value = (pull * term).sum(1)
            hessian[:, row, column] -= value
            if row != column:
                hessian[:, column, row] -= value
        bound = weights / np.maximum(1, np.abs(residuals) / self.delta)
        return gradient, hessian, np.einsum("skn,sn->sk", slopes**2, bound * power**2)
