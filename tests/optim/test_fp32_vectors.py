"""The gain of a norm that is kept in bfloat16 learns what it would learn in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.optim import OptimizerConfig, OptimizerInBackward, build_optimizer
from titanlite.optim.fp32_vectors import MASTER

STEPS, LR = 60, 5e-4
SECTIONS = [
    *({"name": "AdamW", "implementation": how} for how in ("fused", "foreach", "for-loop")),
    {"name": "Adam", "implementation": "for-loop", "state_dtype": "8bit"},
    {"name": "AdamW", "implementation": "for-loop", "offload": True},
    {"name": "SGD", "implementation": "foreach", "momentum": 0.9},
    {"name": "SGD", "implementation": "for-loop"},
]


class Layer(nn.Module):
    """A vector of ones, and a matrix beside it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(128), nn.Linear(128, 2, bias=False)
        self.to(dtype)

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        steady = torch.linspace(-1, 1, 128) + 0.3 * torch.randn(128, generator=generator)
        for parameter in self.parameters():
            parameter.grad = steady.bfloat16().to(parameter.dtype).expand_as(parameter).clone()


def learned(dtype: torch.dtype, section: dict) -> tuple[Layer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = Layer(dtype)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=LR, weight_decay=0.0, **section))
    for step in range(STEPS):
        layer.give_gradients(step)
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    "section", SECTIONS, ids=lambda section: "-".join(map(str, section.values()))
)
def test_gains_in_bf16_move_as_those_in_fp32(section):
    """None of them moved at all: two neighbors near 1 are 8 learning rates apart, or 16."""
    (right, _), (low, optimizer) = learned(torch.float32, section), learned(torch.bfloat16, section)
    expected = right.norm.weight.detach()
    assert (expected - 1).abs().mean() > 0.004
    held = optimizer.state[low.norm.weight]
    torch.testing.assert_close(held[MASTER], expected, rtol=0, atol=1e-6)
    assert low.norm.weight.dtype == torch.bfloat16
    assert torch.equal(low.norm.weight, held[MASTER].bfloat16())
    assert all(v.dtype == torch.float32 for v in held.values() if v.dim())
    assert MASTER not in optimizer.state[low.linear.weight]


@pytest.mark.parametrize("section", SECTIONS[:1] + SECTIONS[3:4], ids=["torch", "lean"])
def test_weights_that_are_replaced_are_what_is_learned_on_from(section):
    """As by a checkpoint of another run, loaded without its optimizer."""
    layer, optimizer = learned(torch.bfloat16, section)
    with torch.no_grad():
        layer.norm.weight[:64] = 2.0
    kept = optimizer.state[layer.norm.weight][MASTER][64:].clone()
    layer.give_gradients(0)
    optimizer.step()
    master = optimizer.state[layer.norm.weight][MASTER]
    assert (master[:64] - 2).abs().max() < 3 * LR and (master[64:] - kept).abs().max() < 3 * LR


def test_they_are_updated_in_backward_too():
    layer = Layer(torch.bfloat16)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=LR, weight_decay=0.0))
    OptimizerInBackward(layer, optimizer)
    for _ in range(STEPS):
        (layer.norm.weight.sum() + layer.linear.weight.sum()).backward()
    expected = torch.full((128,), 1 - STEPS * LR)  # Adam's update under a gradient of 1
    assert torch.equal(layer.norm.weight, expected.bfloat16())
