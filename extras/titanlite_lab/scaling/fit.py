"""Fit a scaling law to measured losses, with bootstrapped errors.

Both fitters work on the logarithms of N and D minus their means. In these coordinates A and alpha,
and B and beta, are nearly independent. In the law's own they are not, and optimizers stop early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from titanlite.errors import DataError
from titanlite.settings import raise_together
from titanlite_lab.scaling.laws import FLOPS_PER_PARAMETER, LAW_FIELDS, ScalingLaw
from titanlite_lab.scaling.log_sum_exp_fit import MAX_EXPONENT, MIN_EXPONENT, LogSumExpProblem
from titanlite_lab.scaling.projection_fit import ProjectionProblem

FitMethod = Literal["huber", "projection", "kaplan"]
FIT_METHODS: dict[FitMethod, str] = {
    "huber": "Huber loss of log residuals, from 54 starts (Chinchilla's approach 3)",
    "projection": "least squares by variable projection",
    "kaplan": "Kaplan's law, Huber loss of log residuals, from 60 starts",
}
MIN_POINTS = 6  # one more than the parameters of a law
MIN_DISTINCT = 3  # values of N and of D: two cannot show a curvature
_ROUNDING = 1e-9  # a smaller share of the loss is an error of rounding
_CENTRAL = (0.025, 0.975)  # of the bootstraps: a 95 % interval


@dataclass(frozen=True)
class LossPoints:
    """Measured losses, arrays [n]."""

    parameters: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray
    count: str = "all"  # what `parameters` counts
    source: str = ""

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def flops(self) -> np.ndarray:
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens

    def select(self, chosen: np.ndarray) -> LossPoints:
        """The points of a mask or an index."""
        arrays = (self.parameters[chosen], self.tokens[chosen], self.losses[chosen])
        return LossPoints(*arrays, self.count, self.source)


@dataclass(frozen=True)
class FittedLaw:
    """A law, how it was fitted, and the laws of resampled points."""

    law: ScalingLaw
    method: FitMethod
    points: int
    objective: float
    starts: tuple[int, int]  # that reached the minimum, of those that were tried
    condition: tuple[float, float]  # of the law's own parameters, and of alpha and beta alone
    samples: np.ndarray  # of LAW_FIELDS, [bootstraps, 6]

    @cached_property
    def resampled(self) -> list[ScalingLaw]:
        """The law of each bootstrap."""
        return [self.law.with_values(row) for row in self.samples.tolist()]

    def errors(self) -> dict[str, float]:
        """Standard error of each parameter and of the exponent of the optimal N."""
        with np.errstate(over="ignore"):  # of A or B, where the points do not determine them
            deviations = self.samples.std(axis=0).tolist()
        errors = dict(zip(LAW_FIELDS, deviations, strict=True))
        return errors | {"exponent": float(np.std([law.exponents[0] for law in self.resampled]))}

    def undetermined(self) -> list[str]:
        """The exponents whose standard error is above half of their value."""
        errors = self.errors()
        return [name for name in ("alpha", "beta") if errors[name] > 0.5 * getattr(self.law, name)]

    def interval(self, of_law: Callable[[ScalingLaw], Any]) -> tuple[Any, Any]:
        """95 % interval of a function of the law, over the bootstraps."""
        values = np.array([of_law(law) for law in self.resampled])
        low, high = np.quantile(values, _CENTRAL, axis=0)
        return low, high


def fit_law(
    points: LossPoints, method: FitMethod = "huber", bootstraps: int = 1000, seed: int = 0
) -> FittedLaw:
    """Fit a law, and fit it again to `bootstraps` samples of the points with replacement.

    Raises DataError for points that cannot determine a law.
    """
    raise_together(list(_check_points(points)))
    centre = np.log(points.parameters).mean(), np.log(points.tokens).mean()
    x, z = np.log(points.parameters) - centre[0], np.log(points.tokens) - centre[1]
    weights = _resample(len(points), bootstraps, seed)
    if method == "projection":
        rows, objective, starts = _fit_projection(ProjectionProblem(x, z, points.losses), weights)
    else:
        problem = LogSumExpProblem(x, z, np.log(points.losses), kaplan=method == "kaplan")
        rows, objective, starts = _fit_log_sum_exp(problem, weights)
    _refuse_without_effect(rows[0])
    rows[:, 1] *= np.exp(rows[:, 3] * centre[0])
    rows[:, 2] *= np.exp(rows[:, 4] * centre[1])
    E, A, B, alpha, beta, power = rows[0].tolist()
    law = ScalingLaw(E, A, B, alpha, beta, power, points.count, points.source)
    condition = _condition_numbers(law, points, ProjectionProblem(x, z, points.losses))
    return FittedLaw(law, method, len(points), objective, starts, condition, rows[1:])


def _check_points(points: LossPoints) -> Iterator[DataError]:
    source = points.source or "points"
    if len(points) < MIN_POINTS:
        yield DataError(
            f"{source}: {len(points)} points; a law has five parameters.",
            fix=f"Give at least {MIN_POINTS}.",
        )
    for name, values in (("parameters", points.parameters), ("tokens", points.tokens)):
        if 0 < len(np.unique(values)) < MIN_DISTINCT:
            yield DataError(
                f"{source}: {len(np.unique(values))} different numbers of {name}; the exponent of"
                f" {name} needs at least {MIN_DISTINCT}.",
                fix="Train more sizes." if name == "parameters" else "Train on more budgets.",
            )
    bad = ~np.isfinite(points.losses) | (points.losses <= 0)
    bad |= ~(points.parameters > 0) | ~(points.tokens > 0)
    with np.errstate(over="ignore", under="ignore"):
        bad |= ~np.isfinite(points.flops) | ~(points.flops > 0)
    if bad.any():
        yield DataError(
            f"{source}: point {int(np.flatnonzero(bad)[0]) + 1}: parameters, tokens, loss and"
            " FLOPs must be positive and finite."
        )


def _resample(points: int, bootstraps: int, seed: int) -> np.ndarray:
    """How often each point is drawn, [bootstraps, n]."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(points, np.full(points, 1 / points), bootstraps).astype(float)


def _fit_projection(problem: ProjectionProblem, weights: np.ndarray):
    """(rows of LAW_FIELDS, first the fit and then the bootstraps; objective; starts)."""
    coefficients, exponents, reached = problem.solve()
    objective = float(problem.objective(exponents))
    starts = np.repeat(exponents[None], len(weights), axis=0)
    resampled, found, _ = problem.refine(starts, weights)
    coefficients = np.concatenate([coefficients[None], resampled])
    exponents = np.concatenate([exponents[None], found])
    powers = np.ones((len(exponents), 1))
    return np.concatenate([coefficients, exponents, powers], axis=1), objective, reached


def _fit_log_sum_exp(problem: LogSumExpProblem, weights: np.ndarray):
    """As `_fit_projection`."""
    theta, objective, reached = problem.solve()
    starts = np.repeat(theta[None], len(weights), axis=0)
    found = np.concatenate([theta[None], problem.minimize(starts, weights)[0]])
    a, alpha, b, beta, e, log_power = found.T
    rows = np.stack([np.exp(e), np.exp(a), np.exp(b), alpha, beta, np.exp(log_power)], axis=1)
    return rows, objective, reached


def _refuse_without_effect(row: np.ndarray) -> None:
    """Raise DataError for a fit in which N or D has no effect that a power law describes.

    `row` has LAW_FIELDS, A and B of N and D relative to their centre.
    """
    constant, *effects = row[:3].tolist()
    exponents = dict(zip(("alpha", "beta"), row[3:5].tolist(), strict=True))
    for name, value in exponents.items():
        if not 1.01 * MIN_EXPONENT < value < 0.99 * MAX_EXPONENT:
            raise DataError(
                f"{name} = {value:.3g}: these losses do not follow a power law of"
                f" {'N' if name == 'alpha' else 'D'}.",
                fix="Check the columns, leave out runs that diverged, and cover a wider range.",
            )
    for name, effect in zip("ND", effects, strict=True):
        share = effect / (constant + sum(effects))
        if share < _ROUNDING:
            raise DataError(
                f"{name} makes {share:.0e} of the loss: these losses do not fall with {name}.",
                fix="Check the columns, and cover a wider range.",
            )


def _condition_numbers(
    law: ScalingLaw, points: LossPoints, problem: ProjectionProblem
) -> tuple[float, float]:
    """Of the Gauss-Newton matrix of (log A, log B, log E, alpha, beta), and of alpha and beta."""
    n_term = law.A * points.parameters**-law.alpha
    d_term = law.B * points.tokens**-law.beta
    slopes = [n_term, d_term]
    slopes += [-np.log(points.parameters) * n_term, -np.log(points.tokens) * d_term]
    if law.E > 0:
        slopes.append(np.full(len(points), law.E))
    full = float(np.linalg.cond(np.stack(slopes))) ** 2
    return full, problem.condition(np.array([law.alpha, law.beta]))
