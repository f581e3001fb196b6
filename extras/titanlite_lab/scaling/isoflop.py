"""Chinchilla's approaches 1 and 2: power laws of the optimal size, from the measured losses alone.

Approach 1 takes the lowest training curve at each number of FLOPs; approach 2 the minimum of a
parabola through the losses of one number of FLOPs (arXiv:2203.15556, 3.1 and 3.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from titanlite_lab.scaling.fit import LossPoints
from titanlite_lab.scaling.laws import FLOPS_PER_PARAMETER, ScalingLaw

BUDGET_RATIO = 1.1  # FLOPs up to this factor from the middle of a budget count as its own
MIN_SIZES = 5  # on a parabola: through three it always passes
_ENVELOPE_POINTS = 1500  # as in approach 1 of the paper


@dataclass(frozen=True)
class OptimalSizes:
    """Optimal sizes at some budgets, and the power law N = factor x FLOPs^exponent through them."""

    flops: np.ndarray  # [k]
    parameters: np.ndarray  # [k]

    @property
    def tokens(self) -> np.ndarray:
        return self.flops / (FLOPS_PER_PARAMETER * self.parameters)

    @property
    def exponent(self) -> float:
        """a: the optimal N grows as FLOPs^a; nan with less than two different sizes."""
        return self._line()[0]

    def at(self, flops: float) -> float:
        """The optimal N for a budget, by the power law."""
        slope, level = self._line()
        return math.exp(level + slope * math.log(flops))

    def _line(self) -> tuple[float, float]:
        if len(np.unique(self.parameters)) < 2:
            return math.nan, math.nan
        slope, level = np.polyfit(np.log(self.flops), np.log(self.parameters), 1)
        return float(slope), float(level)


@dataclass(frozen=True)
class Parabola:
    """Loss over log N at one budget; `problem` is why its minimum is not used, or empty."""

    flops: float
    points: LossPoints
    coefficients: np.ndarray  # of log N squared, log N - centre, 1
    centre: float
    problem: str

    @property
    def minimum(self) -> float:
        """The N of the lowest loss."""
        square, slope, _ = self.coefficients
        return math.exp(self.centre - slope / (2 * square))

    def loss(self, parameters: np.ndarray) -> np.ndarray:
        """The parabola at some sizes."""
        return np.polyval(self.coefficients, np.log(parameters) - self.centre)


def group_budgets(points: LossPoints) -> list[LossPoints]:
    """Groups of points of about equal FLOPs, by increasing FLOPs.

    The largest group takes its points first, and no point is in two. Groups with less than
    MIN_SIZES sizes are left out.
    """
    logs, free = np.log(points.flops), np.ones(len(points), dtype=bool)
    near = np.abs(logs[:, None] - logs) <= math.log(BUDGET_RATIO) + 1e-9
    groups = []
    while free.any():
        members = near[np.argmax((near & free).sum(axis=1) * free)] & free
        free &= ~members
        if len(np.unique(points.parameters[members])) >= MIN_SIZES:
            groups.append(points.select(members))
    return sorted(groups, key=lambda group: float(np.median(group.flops)))


def fit_parabolas(points: LossPoints) -> list[Parabola]:
    """Approach 2: a parabola of the loss over log N for every budget."""
    return [_fit_parabola(group) for group in group_budgets(points)]


def _fit_parabola(group: LossPoints) -> Parabola:
    logs = np.log(group.parameters)
    centre = float(logs.mean())
    coefficients = np.polyfit(logs - centre, group.losses, 2)
    flops, problem = float(np.exp(np.log(group.flops).mean())), ""
    if coefficients[0] <= 0:
        problem = "it has no minimum"
    else:
        at = centre - coefficients[1] / (2 * coefficients[0])
        if not logs.min() <= at <= logs.max():
            problem = "its minimum is outside the sizes"
    return Parabola(flops, group, coefficients, centre, problem)


def parabola_optima(parabolas: Sequence[Parabola]) -> OptimalSizes:
    """The minima of the parabolas that have one within their sizes."""
    usable = [parabola for parabola in parabolas if not parabola.problem]
    flops = np.array([parabola.flops for parabola in usable])
    return OptimalSizes(flops, np.array([parabola.minimum for parabola in usable]))


@dataclass(frozen=True)
class ParabolaBias:
    """What approach 2 finds on losses of a known law, without noise."""

    law: ScalingLaw
    found: OptimalSizes

    @property
    def exponents(self) -> tuple[float, float]:
        """(found, true)."""
        return self.found.exponent, self.law.exponents[0]

    def size_ratio(self, flops: float) -> float:
        """The optimal N that approach 2 extrapolates to a budget, divided by the true one."""
        return self.found.at(flops) / self.law.optimum(flops)[0]

    def wasted(self, flops: float) -> float:
        """Fraction of a budget that is wasted by training the size that approach 2 finds."""
        parameters = self.found.at(flops)
        if not math.isfinite(parameters):
            return math.nan
        loss = self.law.loss(parameters, flops / (FLOPS_PER_PARAMETER * parameters))
        low, high = math.log(flops) - 20.0, math.log(flops)
        for _ in range(80):  # the budget whose optimum has this loss
            middle = (low + high) / 2
            reaches = self.law.loss(*self.law.optimum(math.exp(middle))) <= loss
            low, high = (low, middle) if reaches else (middle, high)
        return 1 - math.exp(high) / flops


def parabola_bias(law: ScalingLaw, parabolas: Sequence[Parabola]) -> ParabolaBias:
    """Approach 2 on the same sizes and budgets, with the exact losses of a law."""
    exact = [
        _fit_parabola(dataclasses.replace(
            parabola.points, losses=law.loss(parabola.points.parameters, parabola.points.tokens)
        ))
        for parabola in parabolas
    ]  # fmt: skip
    return ParabolaBias(law, parabola_optima(exact))


def isoflop_grid(
    law: ScalingLaw,
    budgets: Sequence[float] | np.ndarray,
    width: float,
    sizes: int,
    offset: float | np.ndarray = 1.0,
) -> LossPoints:
    """Exact losses of a law: sizes from optimum x offset / width to optimum x offset x width.

    `offset` may differ between the budgets, [len(budgets)].
    """
    flops = np.repeat(np.asarray(budgets, dtype=float), sizes)
    factors = np.tile(np.geomspace(1 / width, width, sizes), len(budgets))
    factors *= np.repeat(np.broadcast_to(offset, len(budgets)), sizes)
    parameters = law.optimum(flops)[0] * factors
    tokens = flops / (FLOPS_PER_PARAMETER * parameters)
    return LossPoints(parameters, tokens, law.loss(parameters, tokens), law.count, "synthetic")


# --- approach 1 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCurve:
    """Losses of one size over its training tokens, arrays [k] that increase in tokens."""

    parameters: float
    tokens: np.ndarray
    losses: np.ndarray


def curves_of(points: LossPoints) -> list[TrainingCurve]:
    """The points of each size as one curve."""
    curves = []
    for size in np.unique(points.parameters):
        of_size = points.select(points.parameters == size)
        tokens, first = np.unique(of_size.tokens, return_index=True)
        curves.append(TrainingCurve(float(size), tokens, of_size.losses[first]))
    return curves


def training_envelope(curves: Sequence[TrainingCurve]) -> OptimalSizes:
    """Approach 1: the size of the lowest curve at each number of FLOPs.

    Only where smaller and larger models were measured too: the smallest or largest of those that
    were trained is not the optimum.
    """
    curves = [curve for curve in curves if len(curve.tokens) > 1]
    chosen = list(_lowest(curves)) if curves else []
    pairs = np.array(chosen, dtype=float).reshape(-1, 2)
    return OptimalSizes(pairs[:, 0], pairs[:, 1])


def _lowest(curves: Sequence[TrainingCurve]) -> Iterator[tuple[float, float]]:
    """(FLOPs, N) of the lowest curve, where larger and smaller ones were measured too."""
    logs = [np.log(FLOPS_PER_PARAMETER * c.parameters * c.tokens) for c in curves]
    grid = np.linspace(min(x[0] for x in logs), max(x[-1] for x in logs), _ENVELOPE_POINTS)
    losses = np.stack([
        np.interp(grid, x, curve.losses, left=np.inf, right=np.inf)
        for x, curve in zip(logs, curves, strict=True)
    ])  # fmt: skip
    sizes = np.array([curve.parameters for curve in curves])
    for column, row in enumerate(losses.argmin(axis=0)):
        measured = sizes[np.isfinite(losses[:, column])]
        if len(measured) and measured.min() < sizes[row] < measured.max():
            yield math.exp(grid[column]), sizes[row]
