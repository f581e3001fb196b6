"""Fits of scaling laws, against published fits and exact surfaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import DataError, UserError
from titanlite_lab.scaling.files import TableColumns, read_table
from titanlite_lab.scaling.fit import FIT_METHODS, LossPoints, fit_law
from titanlite_lab.scaling.isoflop import (
    curves_of,
    fit_parabolas,
    isoflop_grid,
    parabola_bias,
    parabola_optima,
    training_envelope,
)
from titanlite_lab.scaling.laws import LAW_FIELDS, LAWS, ScalingLaw, kaplan_law
from titanlite_lab.scaling.projection_fit import ProjectionProblem

DATA = Path(__file__).parent / "data"
ASYMMETRIC = ScalingLaw(1.8, 400.0, 2000.0, 0.25, 0.5)
SYMMETRIC = ScalingLaw(1.8, 400.0, 600.0, 0.31, 0.31)
BUDGETS = np.geomspace(1e18, 1e21, 5)


def chinchilla() -> LossPoints:
    columns = TableColumns(flops="flops")
    return read_table(DATA / "chinchilla.csv", columns, {}, drop_highest=5)


def surface(law: ScalingLaw) -> LossPoints:
    grid = np.meshgrid(np.geomspace(1e7, 1e10, 6), np.geomspace(1e9, 1e12, 6))
    parameters, tokens = (axis.ravel() for axis in grid)
    return LossPoints(parameters, tokens, law.loss(parameters, tokens))


def test_the_huber_fit_finds_the_minimum_of_the_chinchilla_points():
    """Besiroglu et al., arXiv:2404.10102: the digits they print are not the minimum."""
    fitted = fit_law(chinchilla(), "huber", bootstraps=400)
    assert fitted.points == 240
    assert fitted.objective <= 0.0010182741  # of the printed digits: 0.0010228
    assert fitted.starts == (54, 54)
    published = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
    errors = {"E": 0.026, "A": 125, "B": 1293, "alpha": 0.015, "beta": 0.021}
    own = fitted.errors()
    for name, value in published.items():
        assert abs(getattr(fitted.law, name) - value) < errors[name], name
        assert own[name] == pytest.approx(errors[name], rel=0.25), name


def test_variable_projection_reproduces_the_published_fit_of_gadre_c4():
    points = read_table(DATA / "gadre_c4.csv", TableColumns(), {})
    law = fit_law(points, "projection", bootstraps=2).law
    found = (law.E, law.A / 1e6**law.alpha, law.B / 1e9**law.beta, law.alpha, law.beta)
    assert found == pytest.approx((1.3373, 3.4299, 1.4342, 0.2318, 0.2128), rel=1e-3)


@pytest.mark.parametrize("method", FIT_METHODS)
def test_an_exact_surface_is_recovered(method):
    hoffmann = LAWS["hoffmann"]
    laws = [hoffmann, ASYMMETRIC, ScalingLaw(0.5, 30.0, 30.0, 0.1, 0.15)]
    for law in [LAWS["kaplan"]] if method == "kaplan" else laws:
        fitted = fit_law(surface(law), method, bootstraps=2)
        for name in LAW_FIELDS:
            assert getattr(fitted.law, name) == pytest.approx(getattr(law, name), rel=1e-6), name


def test_projection_leaves_out_a_term_that_would_be_negative():
    points = surface(ScalingLaw(0.0, 400.0, 2000.0, 0.3, 0.36))
    x, z = np.log(points.parameters), np.log(points.tokens)
    problem = ProjectionProblem(x - x.mean(), z - z.mean(), points.losses)
    alpha, beta = 0.2, 0.25  # too small: the best E would be negative
    columns = np.stack([np.ones(len(x)), np.exp(-alpha * problem.x), np.exp(-beta * problem.z)])
    assert np.linalg.lstsq(columns.T, points.losses)[0][0] < -0.1
    expected = np.linalg.lstsq(columns[1:].T, points.losses)[1][0]
    assert problem.objective(np.array([alpha, beta])) == pytest.approx(expected, rel=1e-9)


def test_alpha_and_beta_alone_are_better_conditioned_than_all_parameters():
    full, projected = fit_law(chinchilla(), "projection", bootstraps=2).condition
    assert full > 1e6
    assert projected < 11


def test_the_condition_number_of_a_law_without_e_includes_both_exponents():
    points = surface(ScalingLaw(0.0, 400.0, 2000.0, 0.3, 0.36))
    losses = points.losses - 0.05  # the best E would be negative
    fitted = fit_law(LossPoints(points.parameters, points.tokens, losses), "projection", 2)
    exchanged = fit_law(LossPoints(points.tokens, points.parameters, losses), "projection", 2)
    assert fitted.law.E == exchanged.law.E == 0
    assert fitted.condition == pytest.approx(exchanged.condition, rel=1e-3)


def test_weights_of_a_bootstrap_are_repetitions_of_points():
    points = chinchilla().select(np.arange(40))
    fitted = fit_law(points, "huber", bootstraps=3, seed=5)
    drawn = np.random.default_rng(5).multinomial(40, np.full(40, 1 / 40), 3)
    for counts, sample in zip(drawn, fitted.resampled, strict=True):
        repeated = fit_law(points.select(np.repeat(np.arange(40), counts)), bootstraps=2).law
        assert sample.exponents == pytest.approx(repeated.exponents, rel=1e-4)


def test_parabolas_are_biased_unless_the_law_is_symmetric():
    """arXiv:2603.22339: no noise, and yet the wrong sizes."""
    ratios = {}
    for law in (SYMMETRIC, ASYMMETRIC):
        for width in (2.0, 16.0):
            grid = isoflop_grid(law, BUDGETS, width, 15)
            bias = parabola_bias(law, fit_parabolas(grid))
            ratios[law, width] = bias.size_ratio(1e24)
            assert bias.exponents[0] == pytest.approx(bias.exponents[1], rel=1e-9)
    assert ratios[SYMMETRIC, 16.0] == pytest.approx(1.0, abs=1e-9)
    assert ratios[ASYMMETRIC, 2.0] == pytest.approx(0.986, abs=2e-3)
    assert ratios[ASYMMETRIC, 16.0] == pytest.approx(0.807, abs=2e-3)


def test_parabolas_of_sizes_that_drift_from_the_optimum_have_the_wrong_exponent():
    offsets = (BUDGETS / BUDGETS[0]) ** 0.15
    grid = isoflop_grid(ASYMMETRIC, BUDGETS, 8.0, 15, offsets)
    bias = parabola_bias(ASYMMETRIC, fit_parabolas(grid))
    assert bias.exponents[0] > bias.exponents[1] + 0.005
    assert 0.005 < bias.wasted(1e25) < 0.5
    fitted = fit_law(grid, "projection", bootstraps=2).law
    assert fitted.exponents == pytest.approx(ASYMMETRIC.exponents, rel=1e-6)


def test_a_parabola_without_a_minimum_is_left_out_with_the_reason():
    grid = isoflop_grid(ASYMMETRIC, BUDGETS, 1.5, 7, offset=10.0)
    parabolas = fit_parabolas(grid)
    assert {parabola.problem for parabola in parabolas} == {"its minimum is outside the sizes"}
    assert np.isnan(parabola_optima(parabolas).exponent)


def test_budgets_are_grouped_by_their_flops():
    parabolas = fit_parabolas(chinchilla())
    assert len(parabolas) == 17
    assert parabola_optima(parabolas).exponent == pytest.approx(0.49, abs=0.02)  # the paper's


def test_the_envelope_of_exact_training_curves_has_the_exponent_of_the_law():
    law = LAWS["hoffmann"]
    sizes, tokens = np.geomspace(1e7, 1e11, 25), np.geomspace(1e8, 1e13, 200)
    parameters, tokens = (axis.ravel() for axis in np.meshgrid(sizes, tokens))
    points = LossPoints(parameters, tokens, law.loss(parameters, tokens))
    envelope = training_envelope(curves_of(points))
    assert envelope.exponent == pytest.approx(law.exponents[0], abs=0.01)
    inner = np.unique(envelope.parameters)
    assert sizes[0] < inner[0] and inner[-1] < sizes[-1]  # the ends only bound the optimum


def test_points_that_cannot_determine_a_law_are_refused_with_all_reasons():
    few = LossPoints(np.array([1e6, 1e6, 2e6]), np.full(3, 1e9), np.array([3.0, 2.9, np.nan]))
    with pytest.raises(UserError) as refused:
        fit_law(few)
    for part in ("3 points", "numbers of parameters", "numbers of tokens", "point 3"):
        assert part in str(refused.value)
    exact = surface(ScalingLaw(1.0, 0.0, 500.0, 0.3, 0.3))
    with pytest.raises(DataError, match="do not f"):
        fit_law(exact, "projection", bootstraps=2)
    for extreme in (1e200, 1e-200):  # FLOPs of inf and 0, which no group of budgets contains
        sizes, tokens = exact.parameters.copy(), exact.tokens.copy()
        sizes[0] = tokens[0] = extreme
        with pytest.raises(DataError, match="point 1: .* FLOPs must be"):
            fit_law(replace(exact, parameters=sizes, tokens=tokens))


def test_kaplans_parameters_are_those_of_the_paper():
    law, n, d = kaplan_law(6.4e13, 0.076, 1.8e13, 0.103), 1.5e9, 2e10
    expected = ((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103
    assert law.loss(n, d) == pytest.approx(expected, rel=1e-12)
