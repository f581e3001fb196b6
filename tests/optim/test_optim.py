"""Learning-rate schedule, weight decay, optimizers and clipping follow the configuration."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from titanlite.models import FAMILIES
from titanlite.optim import (
    LR_DECAYS,
    OPTIMIZERS,
    LRSchedulerConfig,
    OptimizerConfig,
    OptimizerRecipe,
    ParameterGroupConfig,
    build_optimizer,
    check_lr_scheduler_config,
    check_optimizer_config,
    clip_gradients,
    lr_factor,
    schedule_warning,
)
from titanlite.settings import build_dataclass


def lr_factors(steps=100, **section):
    config = LRSchedulerConfig(**section)
    return [lr_factor(step, steps, config) for step in range(steps)]


def test_warmup_rises_to_the_peak_and_never_starts_at_zero():
    factors = lr_factors(warmup_steps=10)
    assert factors[0] == pytest.approx(0.1) and factors[9] == 1.0
    assert factors[:10] == sorted(factors[:10])


def test_the_decay_takes_the_last_decay_ratio_of_the_steps():
    factors = lr_factors(warmup_steps=10, decay_ratio=0.2)
    assert all(factor == 1.0 for factor in factors[10:81]) and factors[81] < 1.0
    assert 0 < factors[-1] < 0.1


def test_without_a_ratio_the_decay_begins_after_the_warmup():
    factors = lr_factors(warmup_steps=10)
    assert factors[10] == 1.0 and factors[11] < 1.0


@pytest.mark.parametrize(
    "kind, half", [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5))]
)
def test_each_decay_has_its_shape_and_ends_at_the_minimum(kind, half):
    config = {"warmup_steps": 0, "decay_type": kind}
    assert lr_factor(50, 100, LRSchedulerConfig(**config)) == pytest.approx(half)
    low = LRSchedulerConfig(**config, min_lr_factor=0.1)
    assert lr_factor(100, 100, low) == pytest.approx(0.1)
    assert lr_factor(500, 100, low) == pytest.approx(0.1)  # constant after the schedule


def test_a_warmup_longer_than_the_run_still_ends_at_the_peak():
    """torchtitan limits it too; without the limit, 100 steps ended at half of the peak."""
    factors = lr_factors(steps=100, warmup_steps=200)
    assert factors[0] == pytest.approx(0.01) and factors[-1] == 1.0
    assert "warmup_steps = 200 is more than all 100" in schedule_warning(LRSchedulerConfig(), 100)
    assert not schedule_warning(LRSchedulerConfig(), 200)


def test_a_run_longer_than_the_schedule_is_refused_only_if_its_learning_rate_is_0():
    def problems(**section):
        return [
            *check_lr_scheduler_config(LRSchedulerConfig(warmup_steps=10, **section), steps=150)
        ]

    assert problems(total_steps=100) and not problems() and not problems(total_steps=200)
    assert not problems(total_steps=100, min_lr_factor=0.1)
    assert not problems(total_steps=100, decay_ratio=0.0)  # the learning rate is constant
    assert lr_factor(149, 100, LRSchedulerConfig(warmup_steps=10, decay_ratio=0.0)) == 1.0


def test_norms_and_biases_have_no_weight_decay():
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].flavors["debugmodel"])
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.3))
    decayed, undecayed = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3 and undecayed["weight_decay"] == 0
    assert all(p.dim() == 1 for p in undecayed["params"])
    assert all(p.dim() == 2 for p in decayed["params"])
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion"])
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
    assert clip_gradients(parameters, 0.0).total == 5 and parameters[1].grad == 4  # 0: no clipping
    assert clip_gradients(parameters, 1.0).total == 5
    joint = math.hypot(*parameters[0].grad.tolist(), *parameters[1].grad.tolist())
    assert joint == pytest.approx(1.0, rel=1e-5)
    assert clip_gradients(parameters, 10.0).total == pytest.approx(
        1.0, rel=1e-5
    )  # a shorter one is not scaled


def test_a_new_optimizer_is_one_function_and_one_line(monkeypatch):
    monkeypatch.setitem(
        OPTIMIZERS,
        "Rprop",
        lambda config: OptimizerRecipe(torch.optim.Rprop, {"lr": config.lr}),
    )
    config, errors = build_dataclass(OptimizerConfig, {"name": "Rprop", "weight_decay": 0.0})
    assert not errors
    model = nn.RMSNorm(4, dtype=torch.bfloat16)  # with a float32 copy, as every optimizer
    (optimizer,) = build_optimizer(model, config)
    assert isinstance(optimizer, torch.optim.Rprop)
    model(torch.arange(4.0, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["float32"].dtype == torch.float32


def test_a_new_optimizer_refuses_the_settings_of_adams_moments(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "Rprop", lambda config: OptimizerRecipe(torch.optim.Rprop, {}))
    config = OptimizerConfig(name="Rprop", state_dtype="8bit", offload=True)
    assert [str(error) for error in check_optimizer_config(config, "float32")] == [
        'optimizer.state_dtype = "8bit": applies to AdamW, Adam and Muon only; optimizer.name is'
        " Rprop. Remove optimizer.state_dtype, or use AdamW.",
        "optimizer.offload = true: applies to AdamW and Adam only; optimizer.name is Rprop."
        " Remove optimizer.offload, or use AdamW.",
    ]


GROUP = {"match": ["output.*"]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"momentum": 0.9}, "optimizer.momentum = 0.9: applies to SGD only"),
        (
            {"name": "Lion", "eps": 1e-6},
            "optimizer.eps = 1e-06: applies to AdamW, Adam",
        ),
        ({"clip_threshold": 2.0}, "clip_threshold = 2.0: applies to Adafactor only"),
        ({"name": "SGD", "nesterov": True}, "nesterov = true: optimizer.momentum is 0"),
        (
            {"name": "Adafactor", "early_step_in_backward": True},
            "early_step_in_backward = true: applies to AdamW, Adam, SGD and Lion only",
        ),
        (
            {"name": "Muon", "early_step_in_backward": True},
            "early_step_in_backward = true: applies to AdamW, Adam, SGD and Lion only",
        ),
        ({"name": "Muon", "offload": True}, "offload = true: applies to AdamW and Adam only"),
        ({"muon_per_head": True}, "muon_per_head = true: applies to Muon only"),
        ({"name": "Muon", "momentum": 0.9}, "momentum = 0.9: applies to SGD only"),
        (
            {"name": "Muon", "state_dtype": "8bit"},
            'state_dtype = "8bit": optimizer.name is Muon, whose momentum is stored in float32 and',
        ),
        (
            {"state_dtype": "4bit", "groups": [{**GROUP, "name": "Muon"}]},
            'state_dtype = "4bit": optimizer.groups[0].name is Muon, whose momentum is stored in',
        ),
        (
            {"early_step_in_backward": True, "groups": [{**GROUP, "name": "Adafactor"}]},
            "optimizer.name is AdamW and Adafactor",
        ),
        (
            {"groups": [{**GROUP, "momentum": 0.0}]},
            "optimizer.groups[0].momentum = 0.0: applies to SGD only",
        ),
        (
            {"name": "SGD", "momentum": 0.9, "groups": [{**GROUP, "name": "Lion", "eps": 1e-6}]},
            "optimizer.groups[0].eps = 1e-06: applies to AdamW, Adam",
        ),
    ],
    ids=str,
)
def test_a_setting_that_the_optimizer_does_not_use_is_refused(section, message):
    config, errors = build_dataclass(OptimizerConfig, section)
    assert not errors
    (error,) = check_optimizer_config(config, "float32")
    assert message in str(error)


def test_a_setting_that_only_a_group_uses_is_accepted():
    groups = [ParameterGroupConfig(match=["output.*"], name="SGD")]
    assert not list(check_optimizer_config(OptimizerConfig(momentum=0.9, groups=groups), "float32"))
    lion = OptimizerConfig(name="Lion", state_dtype="8bit", groups=groups)
    assert len(list(check_optimizer_config(lion, "float32"))) == 1
    adam = [ParameterGroupConfig(match=["output.*"], name="AdamW")]
    lion = OptimizerConfig(name="Lion", state_dtype="8bit", groups=adam)
    assert not list(check_optimizer_config(lion, "float32"))


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"name": "Lion", "beta2": 0.999}, "optimizer.beta2"),
        ({"groups": [{**GROUP, "name": "SGD", "momentum": 0.999}]}, "optimizer.groups[0].momentum"),
        ({"beta1": 0.999}, "optimizer.beta1"),
        ({"name": "Muon", "muon_momentum": 0.999}, "optimizer.muon_momentum"),
    ],
    ids=str,
)
def test_bfloat16_moments_that_would_not_change_are_refused(section, key):
    config, _ = build_dataclass(OptimizerConfig, section)
    (error,) = check_optimizer_config(config, "bfloat16")
    assert str(error).startswith(f"{key} = 0.999: with training.dtype")
    assert not list(check_optimizer_config(config, "float32"))


def test_a_new_lr_decay_is_one_line(monkeypatch):
    monkeypatch.setitem(LR_DECAYS, "square", lambda progress: (1.0 - progress) ** 2)
    config, errors = build_dataclass(LRSchedulerConfig, {"warmup_steps": 0, "decay_type": "square"})
    assert not errors
    assert lr_factor(50, 100, config) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("schema", "key", "allowed"),
    [
        (
            OptimizerConfig,
            "name",
            '"AdamW" | "Adam" | "SGD" | "Adafactor" | "Lion" | "Muon" | "SOAP".'
            ' Did you mean "SGD"?',
        ),
        (LRSchedulerConfig, "decay_type", '"linear" | "sqrt" | "cosine".'),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(schema, key, allowed):
    _, (error,) = build_dataclass(schema, {key: "SGDM"})
    assert str(error) == f'{key} = "SGDM": must be {allowed}'
