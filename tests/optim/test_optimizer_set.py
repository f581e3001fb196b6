"""Several optimizers by parameter group, and a step that is decided on the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from titanlite.optim import (
    OptimizerConfig,
    OptimizerSet,
    ParameterGroupConfig,
    build_optimizer,
)

CASES = [
    {"name": "AdamW"},
    {"name": "Adam"},
    {"name": "AdamW", "implementation": "foreach"},
    {"name": "SGD"},
    {"name": "SGD", "momentum": 0.9, "nesterov": True},
    {"name": "SGD", "momentum": 0.9, "implementation": "foreach"},
    {"name": "Lion"},
    {"name": "Lion", "implementation": "foreach"},
    {"name": "Adafactor"},
    {"name": "Sophia"},
    {"name": "AdamW", "state_dtype": "bfloat16", "implementation": "for-loop"},
    {"name": "AdamW", "state_dtype": "8bit", "implementation": "for-loop"},
    {"name": "AdamW", "state_dtype": "float8", "implementation": "for-loop"},
]


def build(dtype=torch.float32, **section):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(dtype)
    return model, build_optimizer(model, OptimizerConfig.of(**section))


def take_step(model, optimizers, accept: bool | None, bad: float = 1.0, scale: float = 1.0) -> None:
    """`scale` multiplies the gradients before the step, which divides by it."""
    torch.manual_seed(1)
    model(torch.randn(8, 64, dtype=model[0].weight.dtype)).square().mean().mul(scale).backward()
    model[2].weight.grad[3, 4] *= bad
    optimizers.set_lr(1e-2)
    factor = None if scale == 1 else torch.tensor(0.0 if math.isinf(bad) else bad / bad / scale)
    optimizers.step(None if accept is None else torch.tensor(accept), factor)
    optimizers.zero_grad()


def bits(model, optimizers) -> list[bytes]:
    state = [v for values in optimizers.state.values() for v in values.values()]
    tensors = [*model.parameters(), *state]
    return [t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("section", CASES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_rejected_step_changes_no_bit_and_the_next_one_is_normal(section, bad, dtype):
    """0 times NaN is NaN: a step must not be skipped by a multiplication with 0.

    A factor of the gradients that is a power of 2 changes no bit either.
    """
    model, optimizers = build(dtype, **section)
    take_step(model, optimizers, accept=True, scale=4.0)
    before = bits(model, optimizers)
    take_step(model, optimizers, accept=False, bad=bad, scale=4.0)
    optimizers.uncount_steps(1)
    assert bits(model, optimizers) == before
    take_step(model, optimizers, accept=True, scale=0.5)

    other, undisturbed = build(dtype, **section)
    take_step(other, undisturbed, accept=None)
    take_step(other, undisturbed, accept=None)
    assert bits(model, optimizers) == bits(other, undisturbed)


def test_groups_set_the_optimizer_its_settings_and_a_factor_of_the_learning_rate():
    groups = [
        ParameterGroupConfig(match=["2.*"], name="SGD", momentum=0.5, lr_factor=0.1),
        ParameterGroupConfig(match=["*.weight"], beta2=0.5, weight_decay=0.3),
    ]
    config = {"groups": groups, "no_decay": ["*bias"], "weight_decay": 0.2}
    model, optimizers = build(**config)
    optimizers.set_lr(1.0)
    settings = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            kind = type(optimizer).__name__.removeprefix("Conditional")
            for name, parameter in model.named_parameters():
                if any(parameter is p for p in group["params"]):
                    rates = (group["lr"], group["weight_decay"])
                    settings[name] = (kind, *rates, group.get("betas", group.get("momentum")))
    assert settings == {
        "0.weight": ("AdamW", 1.0, 0.3, (0.9, 0.5)),
        "0.bias": ("AdamW", 1.0, 0.0, (0.9, 0.95)),
        "1.weight": ("AdamW", 1.0, 0.3, (0.9, 0.5)),
        "1.bias": ("AdamW", 1.0, 0.0, (0.9, 0.95)),
        "2.weight": ("SGD", 0.1, 0.2, 0.5),
        "2.bias": ("SGD", 0.1, 0.0, 0.5),
    }


def test_other_optimizers_compute_while_one_communicates():
    calls = []

    class Communicating(torch.optim.SGD):
        def begin_step(self, accept):
            calls.append(("begin", accept))
            return lambda: calls.append(("complete", accept))

    class Computing(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(("compute", None))

    parameter = nn.Parameter(torch.zeros(1))
    optimizers = OptimizerSet([Computing([parameter]), Communicating([parameter])], 1.0)
    optimizers.step()
    assert calls == [("begin", None), ("compute", None), ("complete", None)]
    calls.clear()
    accept = torch.tensor(False)
    optimizers.step(accept)
    assert calls == [("begin", accept), ("complete", accept)]
