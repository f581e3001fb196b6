"""Optima of scaling laws, against brute force and published examples."""

from __future__ import annotations

import numpy as np
import pytest

from titanlite.errors import ConfigError
from titanlite_lab.scaling.laws import (
    LAWS,
    Demand,
    ScalingLaw,
    allocate_budget,
    allocate_for_loss,
    overtrained,
    published_law,
)

# the exponents of Sardana et al., arXiv:2401.00448, section 2
SARDANA = ScalingLaw(1.69, 406.4, 410.7, 0.336, 0.283)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("demand", [Demand(), Demand(2e11), Demand(2e11, flop_cost=3.0)], ids=str)
def test_no_other_size_has_a_lower_loss_for_the_budget(name, demand):
    law, flops = LAWS[name], 1e22
    best = allocate_budget(law, flops, demand)
    assert best.total_flops == pytest.approx(flops, rel=1e-9)
    sizes = best.parameters * np.geomspace(1e-3, 1e3, 20_001)
    tokens = (flops - 2 * demand.flop_cost * sizes * demand.tokens) / (6 * sizes)
    losses = law.loss(sizes[tokens > 0], tokens[tokens > 0])
    assert best.loss <= losses.min() * (1 + 1e-12)
    assert best.parameters == pytest.approx(sizes[losses.argmin()], rel=1e-3)


def test_the_cheapest_model_for_a_loss_is_the_best_of_its_budget():
    for law in LAWS.values():
        for demand in (Demand(), Demand(3e12), Demand(3e12, flop_cost=0.5)):
            best = allocate_budget(law, 1e23, demand)
            same = allocate_for_loss(law, best.loss, demand)
            assert same.total_flops == pytest.approx(1e23, rel=1e-6)
            assert same.parameters == pytest.approx(best.parameters, rel=1e-4)


def test_inference_demand_saves_what_sardana_et_al_print():
    """Their figure 1: 13B, 2T tokens of inference; a 7B model saves 17 %, 1.7e22 FLOPs."""
    parameters, demand = 13e9, Demand(2e12)
    reducible = SARDANA.alpha * SARDANA.A * parameters**-SARDANA.alpha / SARDANA.beta
    tokens = (SARDANA.B / reducible) ** (1 / SARDANA.beta)  # compute-optimal
    chinchilla = 6 * parameters * tokens + demand.flops_of(parameters)
    best = allocate_for_loss(SARDANA, SARDANA.loss(parameters, tokens), demand)
    assert best.parameters == pytest.approx(7e9, rel=0.01)
    assert chinchilla - best.total_flops == pytest.approx(1.7e22, rel=0.01)
    assert 1 - best.total_flops / chinchilla == pytest.approx(0.17, abs=0.005)


def test_a_smaller_model_reaches_the_loss_with_more_tokens_or_never():
    law = LAWS["hoffmann"]
    best = allocate_budget(law, 1e22)
    half = overtrained(law, best, 0.5)
    assert half is not None and half.tokens > 2 * best.tokens
    assert law.loss(half.parameters, half.tokens) == pytest.approx(best.loss, rel=1e-12)
    assert half.training_flops > best.training_flops
    assert overtrained(law, best, 0.01) is None


def test_exponents_of_the_published_laws():
    assert LAWS["hoffmann"].exponents[0] == pytest.approx(0.46, abs=0.01)  # their table 2
    assert LAWS["besiroglu"].exponents[0] == pytest.approx(0.3658 / (0.3478 + 0.3658), abs=0.002)
    ratio = LAWS["besiroglu"].optimum(5.76e23)  # Chinchilla's budget: about 20 tokens a parameter
    assert 15 < ratio[1] / ratio[0] < 30


def test_a_budget_or_loss_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="do not pay for 1e\\+12"):
        allocate_budget(LAWS["hoffmann"], 1e12, Demand(1e12))
    with pytest.raises(ConfigError, match="irreducible loss is 1.69"):
        allocate_for_loss(LAWS["hoffmann"], 1.6)
    with pytest.raises(ConfigError, match="hoffmann, besiroglu, kaplan"):
        published_law("chinchila")
