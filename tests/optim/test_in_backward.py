"""An optimizer step in backward equals the step after backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.optim import (
    OptimizerConfig,
    OptimizerInBackward,
    build_optimizer,
    clip_gradients,
)


def train(in_backward: bool, **section):
    """(model, optimizer, gradient norms) after three steps with a decreasing learning rate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = build_optimizer(model, OptimizerConfig.of(**section))
    early, norms = OptimizerInBackward(model, optimizer) if in_backward else None, []
    for step in range(3):
        optimizer.set_lr(0.1 / (step + 1))
        model(torch.randn(8, 64)).square().sum().backward()
        if early:
            assert all(parameter.grad is None for parameter in model.parameters())
            norms.append(early.norms().total)
        else:
            norms.append(clip_gradients(model.parameters(), 0.0).total)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, norms


@pytest.mark.parametrize(
    "section",
    [
        {"name": "SGD", "momentum": 0.9, "implementation": "foreach"},
        {"name": "SGD", "momentum": 0.9, "nesterov": True},
        {"name": "Lion"},
        {"name": "AdamW"},
        {"name": "Adam", "state_dtype": "8bit", "implementation": "for-loop"},
    ],
    ids=lambda section: section["name"],
)
def test_steps_in_backward_give_the_same_weights_and_state(section):
    model, optimizer, norms = train(False, **section)
    early_model, early_optimizer, early_norms = train(True, **section)
    assert torch.stack(early_norms) == pytest.approx(torch.stack(norms), rel=1e-6)
    for actual, right in zip(early_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(actual, right)
    # so a checkpoint of one can be loaded by the other
    ((saved,), (expected,)) = ([o.state_dict() for o in s] for s in (early_optimizer, optimizer))
    assert saved["param_groups"] == expected["param_groups"]
    for number, moments in expected["state"].items():
        for name, moment in moments.items():
            assert torch.equal(saved["state"][number][name], moment)
