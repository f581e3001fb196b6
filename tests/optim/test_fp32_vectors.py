"""The gain of a bfloat16 norm learns as it would in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.optim import OptimizerConfig, OptimizerInBackward, build_optimizer
from titanlite.optim.fp32_vectors import MASTER

STEPS, LR = 60, 5e-4
SECTIONS = [
    *({"name": "AdamW", "implementation": name} for name in ("fused", "foreach", "for-loop")),
    {"name": "Adam", "implementation": "for-loop", "state_dtype": "8bit"},
    {"name": "AdamW", "implementation": "for-loop", "offload": True},
    {"name": "SGD", "implementation": "foreach", "momentum": 0.9},
    {"name": "SGD", "implementation": "for-loop"},
    {"name": "Lion"},
    {"name": "Adafactor"},
]


class Layer(nn.Module):
    """A norm with a vector of ones, and a matrix."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(128), nn.Linear(128, 2, bias=False)
        self.to(dtype)

    def set_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        steady = torch.linspace(-1, 1, 128) + 0.3 * torch.randn(128, generator=generator)
        for parameter in self.parameters():
            parameter.grad = steady.bfloat16().to(parameter.dtype).expand_as(parameter).clone()


def train(dtype: torch.dtype, section: dict) -> tuple[Layer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = Layer(dtype)
    optimizer = build_optimizer(layer, OptimizerConfig.of(lr=LR, weight_decay=0.0, **section))
    for step in range(STEPS):
        layer.set_gradients(step)
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    "section", SECTIONS, ids=lambda section: "-".join(map(str, section.values()))
)
def test_bf16_gains_learn_like_fp32_gains(section):
    """Without the copies no gain changed: bf16 numbers near 1 are 8 or 16 learning rates apart."""
    (high, _), (low, optimizer) = train(torch.float32, section), train(torch.bfloat16, section)
    expected = high.norm.weight.detach()
    assert (expected - 1).abs().mean() > 0.004
    state = optimizer.state[low.norm.weight]
    torch.testing.assert_close(state[MASTER], expected, rtol=0, atol=1e-6)
    assert low.norm.weight.dtype == torch.bfloat16
    assert torch.equal(low.norm.weight, state[MASTER].bfloat16())
    assert all(v.dtype == torch.float32 for v in state.values() if v.dim())
    assert MASTER not in optimizer.state[low.linear.weight]


@pytest.mark.parametrize("section", SECTIONS[:1] + SECTIONS[3:4], ids=["torch", "low-memory"])
def test_training_continues_from_replaced_weights(section):
    """For example from another run's checkpoint, loaded without its optimizer."""
    layer, optimizer = train(torch.bfloat16, section)
    with torch.no_grad():
        layer.norm.weight[:64] = 2.0
    before = optimizer.state[layer.norm.weight][MASTER][64:].clone()
    layer.set_gradients(0)
    optimizer.step()
    master = optimizer.state[layer.norm.weight][MASTER]
    assert (master[:64] - 2).abs().max() < 3 * LR and (master[64:] - before).abs().max() < 3 * LR


def test_the_optimizer_in_backward_updates_the_copies_too():
    layer = Layer(torch.bfloat16)
    optimizer = build_optimizer(layer, OptimizerConfig.of(lr=LR, weight_decay=0.0))
    OptimizerInBackward(layer, optimizer)
    for _ in range(STEPS):
        (layer.norm.weight.sum() + layer.linear.weight.sum()).backward()
    expected = torch.full((128,), 1 - STEPS * LR)  # Adam's update under a gradient of 1
    assert torch.equal(layer.norm.weight, expected.bfloat16())
