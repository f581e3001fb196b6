"""Each optimizer equals an independent implementation on fixed numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from titanlite.optim import OptimizerConfig, build_optimizer

STEPS, LR, DECAY = 5, 0.02, 0.1
SHAPES = ((6, 4), (4, 7), (5,))


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(random_values(shape, 100 + i)) for i, shape in enumerate(SHAPES)]


def gradients(step: int) -> list[torch.Tensor]:
    """Rows of very different size; one column is 0 in some steps."""
    values = [random_values(shape, 10 * step + i) for i, shape in enumerate(SHAPES)]
    for value in values:
        value *= torch.logspace(-4, 0, len(value)).view(-1, *[1] * (value.dim() - 1))
        if value.dim() == 2 and step % 2:
            value[:, 1] = 0
    return values


def random_values(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer, parameters) -> list[torch.Tensor]:
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach().double() for parameter in parameters]


def trained(**section) -> list[torch.Tensor]:
    parameters = weights()
    config = OptimizerConfig.of(lr=LR, weight_decay=DECAY, **section)
    return train(build_optimizer(nn.ParameterList(parameters), config), parameters)


def assert_equal(actual, expected, tolerance: float = 1e-5) -> None:
    """Updates, not weights, within a relative tolerance."""
    for value, right, start in zip(actual, expected, weights(), strict=True):
        change = (right - start.double()).abs().max().item()
        assert (value - right).abs().max().item() <= tolerance * change


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    ids=["plain", "momentum", "nesterov"],
)
@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_sgd_equals_torch_in_float64(options, implementation):
    doubles = [nn.Parameter(w.detach().double()) for w in weights()]
    reference = torch.optim.SGD(doubles, lr=LR, weight_decay=DECAY, **options)
    expected = train(reference, doubles)
    assert_equal(trained(name="SGD", implementation=implementation, **options), expected)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach"])
def test_lion_equals_algorithm_2_of_its_paper(implementation):
    """In float64, element by element."""
    beta1, beta2, expected = 0.9, 0.99, []
    for index, start in enumerate(weights()):
        rows = [g[index].flatten().tolist() for g in map(gradients, range(STEPS))]
        values = []
        for element, w in enumerate(start.flatten().tolist()):
            m = 0.0
            for row in rows:
                g = row[element]
                c = beta1 * m + (1 - beta1) * g
                w = w - LR * ((c > 0) - (c < 0) + DECAY * w)
                m = beta2 * m + (1 - beta2) * g
            values.append(w)
        expected.append(torch.tensor(values, dtype=torch.float64).view(start.shape))
    assert_equal(trained(name="Lion", beta2=beta2, implementation=implementation), expected)


@pytest.mark.parametrize("clip", [1.0, 1.5])
def test_adafactor_equals_torch(clip):
    parameters = [nn.Parameter(w.detach().double()) for w in weights()]
    # torch limits the learning rate by 1 / sqrt(step), which is above LR here
    reference = torch.optim.Adafactor(
        parameters, lr=LR, beta2_decay=-0.8, eps=(1e-15, 1e-3), d=clip, weight_decay=DECAY
    )
    expected = train(reference, parameters)
    assert_equal(trained(name="Adafactor", clip_threshold=clip), expected)


def test_adafactor_equals_algorithm_4_of_its_paper():
    """In float64, without the factor of the parameter's RMS."""
    expected = []
    for index, start in enumerate(weights()):
        w, shape = start.detach().double(), start.shape
        row, column = (torch.zeros(n, dtype=torch.float64) for n in (shape[0], shape[-1]))
        for step in range(1, STEPS + 1):
            g, beta2 = gradients(step - 1)[index].double(), 1 - step**-0.6
            square = g.square() + 1e-30
            row = beta2 * row + (1 - beta2) * (square.sum(1) if g.dim() == 2 else square)
            column = beta2 * column + (1 - beta2) * square.sum(0)
            factored = torch.outer(row, column) / row.sum() if g.dim() == 2 else row
            update = g / factored.sqrt()
            update /= max(1.0, update.square().mean().sqrt().item())
            w = w - LR * update - LR * DECAY * w
        expected.append(w)
    options = {"scale_parameter": False, "beta2_decay": -0.6}
    assert_equal(trained(name="Adafactor", **options), expected)


@pytest.mark.parametrize("name, decoupled", [("AdamW", True), ("Adam", False)])
@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_adam_equals_its_formula(name, decoupled, implementation, state_dtype):
    """In float64. bfloat16 moments have 8 significant bits."""
    if state_dtype == "bfloat16" and implementation != "for-loop":
        return  # foreach is refused; tests/optim/test_adam.py compiles the fused update
    beta1, beta2, eps, expected = 0.9, 0.95, 1e-8, []
    for index, start in enumerate(weights()):
        w = start.detach().double()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(1, STEPS + 1):
            g = gradients(step - 1)[index].double()
            w, g = (w - LR * DECAY * w, g) if decoupled else (w, g + DECAY * w)
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w - LR * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        expected.append(w)
    section = {"name": name, "implementation": implementation, "state_dtype": state_dtype}
    assert_equal(trained(**section), expected, 1e-5 if state_dtype == "float32" else 1e-2)
