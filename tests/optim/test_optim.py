"""Rates, decay and clipping do what the section says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from titanlite.models import FAMILIES
from titanlite.optim import (
    LRSchedulerConfig,
    OptimizerConfig,
    build_optimizer,
    check_lr_scheduler_config,
    clip_gradients,
    lr_factor,
    schedule_warning,
)


def shares(steps=100, **section):
    config = LRSchedulerConfig(**section)
    return [lr_factor(step, steps, config) for step in range(steps)]


def test_warmup_rises_to_the_peak_and_never_starts_at_zero():
    rates = shares(warmup_steps=10)
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])


def test_stable_then_decay_over_the_last_share_of_the_steps():
    rates = shares(warmup_steps=10, decay_ratio=0.2)
    assert all(rate == 1.0 for rate in rates[10:81]) and rates[81] < 1.0
    assert 0 < rates[-1] < 0.1


def test_without_a_ratio_decay_begins_after_the_warmup():
    rates = shares(warmup_steps=10)
    assert rates[10] == 1.0 and rates[11] < 1.0


@pytest.mark.parametrize(
    "kind, half", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_each_decay_has_its_shape_and_ends_at_the_least_rate(kind, half):
    config = {"warmup_steps": 0, "decay_type": kind}
    assert lr_factor(50, 100, LRSchedulerConfig(**config)) == pytest.approx(half)
    low = LRSchedulerConfig(**config, min_lr_factor=0.1)
    assert lr_factor(100, 100, low) == pytest.approx(0.1)
    assert lr_factor(500, 100, low) == pytest.approx(0.1)  # past the end it stays there


def test_a_warmup_longer_than_the_run_still_ends_at_the_peak():
    """As torchtitan caps it; uncapped, a run of 100 steps ended at half of the rate asked for."""
    rates = shares(steps=100, warmup_steps=200)
    assert rates[0] == pytest.approx(0.01) and rates[-1] == 1.0
    assert "warmup_steps = 200 is more than all 100" in schedule_warning(LRSchedulerConfig(), 100)
    assert not schedule_warning(LRSchedulerConfig(), 200)


def test_steps_after_the_schedule_are_refused_only_where_they_learn_nothing():
    def refused(**section):
        return [
            *check_lr_scheduler_config(LRSchedulerConfig(warmup_steps=10, **section), steps=150)
        ]

    assert refused(total_steps=100) and not refused() and not refused(total_steps=200)
    assert not refused(total_steps=100, min_lr_factor=0.1)
    assert not refused(total_steps=100, decay_ratio=0.0)  # the rate stays where it is
    assert lr_factor(149, 100, LRSchedulerConfig(warmup_steps=10, decay_ratio=0.0)) == 1.0


def test_norms_and_biases_are_not_decayed():
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].flavors["debugmodel"])
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decayed, spared = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3 and spared["weight_decay"] == 0
    assert all(p.dim() == 1 for p in spared["params"])
    assert all(p.dim() == 2 for p in decayed["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_every_implementation_makes_the_same_update(name, implementation):
    def update(kind):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            model.weight.copy_(torch.arange(16.0).view(4, 4))
            model.bias.fill_(1)
        config = OptimizerConfig(name=name, implementation=kind, lr=0.1, momentum=0.5)
        optimizer = build_optimizer(model, config)
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert torch.allclose(update(implementation), update("for-loop"), rtol=1e-5)


def test_clipping_scales_all_gradients_by_their_joint_norm():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, 0.0).total == 5 and parameters[1].grad == 4  # 0: left alone
    assert clip_gradients(parameters, 1.0).total == 5
    joint = math.hypot(*parameters[0].grad.tolist(), *parameters[1].grad.tolist())
    assert joint == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients(parameters, 10.0).total == pytest.approx(1.0, rel=1e-5)  # short ones stay
