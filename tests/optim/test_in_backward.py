"""A step taken in backward is the step that would have been taken after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.optim import (
    OptimizerConfig,
    OptimizerInBackward,
    build_optimizer,
    clip_gradients,
    set_lr,
)


def run(early: bool, **section):
    """(model, its optimizer, the norms) after a few steps at falling rates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    optimizer = build_optimizer(model, OptimizerConfig(**section))
    steps, norms = OptimizerInBackward(model, optimizer) if early else None, []
    for step in range(3):
        set_lr(optimizer, 0.1 / (step + 1))
        model(torch.randn(8, 64)).square().sum().backward()
        if steps:
            assert all(parameter.grad is None for parameter in model.parameters())
            norms.append(steps.norms().total)
        else:
            norms.append(clip_gradients(model.parameters(), 0.0).total)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, norms


@pytest.mark.parametrize(
    "section",
    [
        {"name": "SGD", "momentum": 0.9, "implementation": "foreach"},
        {"name": "AdamW"},
        {"name": "Adam", "state_dtype": "8bit", "implementation": "for-loop"},
    ],
    ids=lambda section: section["name"],
)
def test_steps_in_backward_end_where_steps_after_it_do(section):
    (model, optimizer, norms), (early, its, seen) = run(False, **section), run(True, **section)
    assert torch.stack(seen) == pytest.approx(torch.stack(norms), rel=1e-6)
    for ours, right in zip(early.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, right)
    # and so a checkpoint of one is one of the other
    saved, expected = its.state_dict(), optimizer.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    for number, moments in expected["state"].items():
        for name, moment in moments.items():
            assert torch.equal(saved["state"][number][name], moment)
