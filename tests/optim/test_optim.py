"""Weight decay, optimizers and clipping follow the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from titanlite.job.option_checks import check_group_patterns
from titanlite.models import FAMILIES
from titanlite.optim import (
    LR_DECAYS,
    OPTIMIZERS,
    LRSchedulerConfig,
    MatrixFacts,
    OptimizerConfig,
    OptimizerRecipe,
    ParameterGroupConfig,
    build_optimizer,
    check_optimizer_config,
    clip_gradients,
    recipe_of_parameter,
)
from titanlite.optim.low_memory import LowMemoryAdam
from titanlite.optim.recipe import OptimizerKeys
from titanlite.settings import build_dataclass


def test_norms_and_biases_have_no_weight_decay():
    model = FAMILIES["llama3"].build(FAMILIES["llama3"].flavors["debugmodel"])
    optimizer = build_optimizer(model, OptimizerConfig.of(weight_decay=0.3))
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
        momentum = {"momentum": 0.5} if name == "SGD" else {}
        config = OptimizerConfig.of(name=name, implementation=kind, lr=0.1, **momentum)
        optimizer = build_optimizer(model, config)
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    assert torch.allclose(update(implementation), update("for-loop"), rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])  # the loss scale
@pytest.mark.parametrize("max_norm, factor", [(0.0, 1.0), (1.0, 0.2), (10.0, 1.0)])
def test_clipping_limits_the_joint_norm_of_all_gradients(max_norm, factor, scale):
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    grads = [torch.tensor([3.0, 0.0]) * scale, torch.tensor([4.0]) * scale]
    parameters[0].grad, parameters[1].grad = (grad.clone() for grad in grads)
    norms = clip_gradients(parameters, max_norm, scale=scale)
    assert norms.total == 5 and norms.own.tolist() == [3, 4]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, grads, strict=True))
    if max_norm == 0 and scale == 1:
        assert norms.factor is None
    else:
        assert norms.factor.item() * scale == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_large_gradient_is_exact(dtype):
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in (1 << 23, 5)]
    parameters = [nn.Parameter(torch.empty_like(grad, dtype=dtype)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.to(dtype)
    exact = torch.cat([p.grad.double() for p in parameters]).norm().item()
    assert clip_gradients(parameters, 0.0).total.item() == pytest.approx(exact, rel=3e-7)


@dataclass(frozen=True)
class RpropKeys(OptimizerKeys):
    def build_recipe(self, lr: float) -> OptimizerRecipe:
        return OptimizerRecipe(torch.optim.Rprop, {"lr": lr})


def test_a_new_optimizer_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "Rprop", RpropKeys)
    config, errors = build_dataclass(OptimizerConfig, {"name": "Rprop", "weight_decay": 0.0})
    assert not errors
    model = nn.RMSNorm(4, dtype=torch.bfloat16)  # with a float32 copy, as every optimizer
    (optimizer,) = build_optimizer(model, config)
    assert isinstance(optimizer, torch.optim.Rprop)
    model(torch.arange(4.0, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["float32"].dtype == torch.float32


GROUP = {"match": ["output.*"]}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"momentum": 0.9},
            'momentum = 0.9: is not a key of name = "AdamW". Remove it; this name has beta1, beta2,'
            " eps, implementation, early_step_in_backward, state_dtype, offload,"
            " offload_folder. Those with momentum: SGD.",
        ),
        ({"name": "Lion", "eps": 1e-6}, "Those with eps: AdamW, Adam, Muon, SOAP, Sophia."),
        (
            {"name": "Adafactor", "early_step_in_backward": True},
            "Those with early_step_in_backward: AdamW, Adam, SGD, Lion.",
        ),
        ({"name": "Muon", "offload": True}, "Those with offload: AdamW, Adam."),
        ({"name": "Muon", "momentum": 0.9}, "Those with momentum: SGD."),
        (
            {"name": "Muon", "state_dtype": "8bit"},
            'state_dtype = "8bit": optimizer.name is Muon, whose momentum is stored in float32 or',
        ),
        (
            {"state_dtype": "4bit", "groups": [{**GROUP, "name": "Muon"}]},
            'state_dtype = "4bit": optimizer.groups[0].name is Muon, whose momentum is stored in',
        ),
        (
            {"early_step_in_backward": True, "groups": [{**GROUP, "name": "Adafactor"}]},
            "early_step_in_backward = true: optimizer.groups[0].name is Adafactor",
        ),
        (
            {"groups": [{**GROUP, "momentum": 0.0}]},
            "optimizer.groups[0].momentum = 0.0: AdamW has no such key. Remove it.",
        ),
        (
            {"name": "SGD", "momentum": 0.9, "groups": [{**GROUP, "name": "Lion", "eps": 1e-6}]},
            "optimizer.groups[0].eps = 1e-06: Lion has no such key.",
        ),
    ],
    ids=str,
)
def test_a_setting_that_the_optimizer_does_not_have_is_refused(section, message):
    config, errors = build_dataclass(OptimizerConfig, section)
    (error,) = [*errors, *check_optimizer_config(config, "float32")]
    assert message in str(error)


def test_a_group_with_another_optimizer_takes_the_keys_that_both_have():
    groups = [ParameterGroupConfig(match=["output.*"], name="Lion", beta2=0.98)]
    config = OptimizerConfig.of(beta1=0.8, eps=1e-6, state_dtype="8bit", groups=groups)
    assert not list(check_optimizer_config(config, "float32"))
    lion = config.of_parameter("output.weight")
    assert (lion.name, lion.beta1, lion.beta2) == ("Lion", 0.8, 0.98)
    assert lion.state_dtype == "float32" and not hasattr(lion, "eps")
    assert config.of_parameter("norm.weight").state_dtype == "8bit"


def test_what_a_group_leaves_to_adamw_has_the_keys_of_the_section():
    groups = [ParameterGroupConfig(match=["layers.*"], name="SOAP", beta2=0.9)]
    config = OptimizerConfig.of(name="Adam", state_dtype="bfloat16", groups=groups)
    llama = FAMILIES["llama3"]
    facts = MatrixFacts(llama, llama.flavors["debugmodel"])
    norm = recipe_of_parameter("layers.0.ffn_norm.weight", torch.Size([8]), config, facts)
    assert norm.optimizer_class is LowMemoryAdam and norm.options["decoupled"]
    assert norm.options["betas"] == (0.9, 0.9)


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


DECAYS = " | ".join(f'"{name}"' for name in LR_DECAYS)


@pytest.mark.parametrize(
    ("schema", "key", "allowed"),
    [
        (
            OptimizerConfig,
            "name",
            '"AdamW" | "Adam" | "SGD" | "Adafactor" | "Lion" | "Muon" | "SOAP" | "Sophia".'
            ' Did you mean "SGD"?',
        ),
        (LRSchedulerConfig, "decay_type", f"{DECAYS}."),
        (LRSchedulerConfig, "weight_decay_type", f'"constant" | {DECAYS}.'),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(schema, key, allowed):
    _, (error,) = build_dataclass(schema, {key: "SGDM"})
    assert str(error) == f'{key} = "SGDM": must be {allowed}'


def test_group_patterns_that_match_nothing_and_groups_without_parameters_are_refused():
    names = ["tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.bias"]

    def problems(*patterns: list[str]) -> list[str]:
        groups = [ParameterGroupConfig(match=match) for match in patterns]
        return [str(error) for error in check_group_patterns(groups, names)]

    assert not problems(["tok_embeddings.*"], ["*.attention.*"], ["layers.*"])
    (typo,) = problems(["*.bias", "tok_embedings.*"])
    assert typo.startswith('optimizer.groups[0].match = "tok_embedings.*": matches no parameter')
    assert "tok_embeddings.weight" in typo
    (hidden,) = problems(["layers.*"], ["*.attention.*"])
    assert 'optimizer.groups[1].match = ["*.attention.*"]: every parameter' in hidden
