"""Muon: its formula against independent references, and what belongs to it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from titanlite.models import LLAMA3, Llama3Sizes
from titanlite.optim import MatrixFacts, OptimizerConfig, ParameterGroupConfig, build_optimizer
from titanlite.optim.muon import (
    MOMENTUM,
    POLAR_EXPRESS,
    SAFETY_FACTOR,
    Muon,
    orthogonalization_flops,
    orthogonalize,
)

SIZES = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=88, vocab_size=61)
FACTS = MatrixFacts(LLAMA3, SIZES)


def polar_express(singular_values: Tensor) -> Tensor:
    """What the published polynomials make of the singular values of a matrix of norm 1."""
    x = singular_values / SAFETY_FACTOR
    for a, b, c in POLAR_EXPRESS:
        scaled = x / SAFETY_FACTOR
        x = a * scaled + b * scaled**3 + c * scaled**5
    return x


def reference_orthogonalize(matrix: Tensor) -> Tensor:
    """In float64, by its singular values."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(polar_express(s / matrix.double().norm())) @ vt


@pytest.mark.parametrize("shape", [(32, 88), (65536, 32), (32, 32), (1, 7), (3, 20, 8)], ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_orthogonalization_is_the_published_polynomial_of_the_singular_values(shape, scale):
    torch.manual_seed(0)
    matrices = torch.randn(shape) * scale
    expected = [reference_orthogonalize(m) for m in matrices.reshape(-1, *shape[-2:])]
    result = orthogonalize(matrices).reshape(-1, *shape[-2:])
    torch.testing.assert_close(result.double(), torch.stack(expected), rtol=0, atol=3e-6)
    assert orthogonalize(torch.zeros(shape)).eq(0).all()


def test_the_published_polynomials_are_the_nearest_to_one():
    """Their composition deviates equally in both directions, as a minimax polynomial does."""
    x = torch.logspace(-3, 0, 100_001, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert x.max() - 1 == pytest.approx(1 - x.min().item(), rel=1e-6)
    assert x.max() - 1 == pytest.approx(0.1236, abs=1e-4)


def test_an_orthogonalized_matrix_is_near_the_polar_factor():
    torch.manual_seed(0)
    matrix = torch.randn(64, 256)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    values = torch.linalg.svdvals(orthogonalize(matrix))
    assert values.min() > 0.84 and values.max() < 1.13
    cosine = (orthogonalize(matrix) * (u @ vt)).sum() / (orthogonalize(matrix).norm() * 8)
    assert cosine > 0.99


def build(sizes: Llama3Sizes = SIZES, **section) -> tuple[nn.Module, list]:
    torch.manual_seed(0)
    model = LLAMA3.build(sizes)
    config = OptimizerConfig.of(**{"name": "Muon", "lr": 1e-2, **section})
    return model, build_optimizer(model, config, MatrixFacts(LLAMA3, sizes))


def optimizer_of(model: nn.Module, optimizers) -> dict[str, str]:
    """Name of the optimizer of each parameter."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    return {
        name_of[p]: type(optimizer).__name__
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_muon_has_the_matrices_inside_the_blocks():
    model, optimizers = build()
    names = optimizer_of(model, optimizers)
    assert set(names) == {name for name, _ in model.named_parameters()}
    for name, optimizer in names.items():
        is_hidden = name.startswith("layers.") and "norm" not in name
        assert optimizer == ("Muon" if is_hidden else "ConditionalAdamW"), name


def test_groups_choose_between_muon_and_other_optimizers():
    adam = ParameterGroupConfig(match=["*.w2.weight"], name="AdamW")
    model, optimizers = build(groups=[adam])
    names = optimizer_of(model, optimizers)
    assert names["layers.0.feed_forward.w2.weight"] == "ConditionalAdamW"
    assert names["layers.0.feed_forward.w1.weight"] == "Muon"
    muon = ParameterGroupConfig(match=["output.*", "*norm.weight"], name="Muon")
    model, optimizers = build(name="AdamW", groups=[muon])
    names = optimizer_of(model, optimizers)
    assert [name for name, optimizer in names.items() if optimizer == "Muon"] == ["output.weight"]


def reference_steps(
    weight: Tensor, grads: list[Tensor], lr: float, weight_decay: float, heads: int = 1
) -> tuple[Tensor, Tensor]:
    """(weight, momentum) after steps of Muon in float64: Jordan's update, Moonlight's scale."""
    w, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for grad in (g.double() for g in grads):
        momentum = 0.95 * momentum + 0.05 * grad
        update = 0.95 * momentum + 0.05 * grad
        parts = [reference_orthogonalize(part) for part in update.chunk(heads)]
        scale = 0.2 * math.sqrt(max(parts[0].shape))
        w = w - lr * weight_decay * w - lr * scale * torch.cat(parts)
    return w, momentum


@pytest.mark.parametrize("per_head", [False, True], ids=["whole", "per head"])
def test_five_steps_match_the_formula_in_float64(per_head):
    model, optimizers = build(muon_per_head=per_head, weight_decay=0.3)
    names = {
        "layers.0.attention.wq.weight": SIZES.n_heads,
        "layers.1.attention.wk.weight": SIZES.n_kv_heads,
        "layers.1.attention.wv.weight": SIZES.n_kv_heads,
        "layers.1.attention.wo.weight": 1,
        "layers.0.feed_forward.w1.weight": 1,
        "layers.1.feed_forward.w2.weight": 1,
    }
    before = {name: model.get_parameter(name).detach().clone() for name in names}
    grads: dict[str, list[Tensor]] = {name: [] for name in names}
    for _ in range(5):
        for name in names:
            parameter = model.get_parameter(name)
            parameter.grad = torch.randn_like(parameter)
            grads[name].append(parameter.grad)
        optimizers.set_lr(1e-2)
        optimizers.step()
    for name, heads in names.items():
        weight, momentum = reference_steps(
            before[name], grads[name], 1e-2, 0.3, heads if per_head else 1
        )
        parameter = model.get_parameter(name)
        stored = optimizers.state[parameter][MOMENTUM]
        torch.testing.assert_close(parameter.double(), weight, rtol=0, atol=2e-6)
        torch.testing.assert_close(stored.double(), momentum, rtol=1e-6, atol=1e-6)


def test_torch_muon_takes_nearly_the_same_step():
    """Its Newton-Schulz iteration is Jordan's in bfloat16: other singular values, same vectors."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.full((64, 96), 0.1)) for _ in range(2))
    muon = Muon([{"params": [ours], "weight_decay": 0.1}], lr=1e-2)
    reference = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        ours.grad = torch.randn(64, 96)
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone(), theirs.detach().clone()
        muon.step()
        reference.step()
        steps = [p.detach() - b for p, b in zip((ours, theirs), before, strict=True)]
        cosine = torch.nn.functional.cosine_similarity(*(s.flatten() for s in steps), dim=0)
        assert cosine > 0.97
        assert 0.8 < steps[0].norm() / steps[1].norm() < 1.25
    momentum = reference.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(muon.state[ours][MOMENTUM], momentum)


def test_the_updates_have_the_size_of_adamws():
    """RMS 0.2 to 0.4 of the learning rate, for every shape (Moonlight, section 2.2)."""
    for shape in [(64, 64), (64, 512), (512, 64)]:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape)
        Muon([{"params": [parameter]}], lr=1.0).step()
        assert parameter.detach().square().mean().sqrt() == pytest.approx(0.2, rel=0.01)


def test_flops_are_those_of_the_matmuls():
    from torch.utils.flop_counter import FlopCounterMode

    for shape in [(32, 88), (88, 32)]:
        with FlopCounterMode(display=False) as counter:
            orthogonalize(torch.randn(shape))
        assert counter.get_total_flops() == orthogonalization_flops(*shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("section", [{}, {"state_dtype": "bfloat16"}, {"muon_per_head": True}])
def test_a_rejected_step_keeps_all_bits(section, bad):
    model, optimizers = build(implementation="for-loop", **section)

    def step(accept: bool, bad: float | None = None) -> None:
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        if bad is not None:
            model.get_parameter("layers.1.attention.wq.weight").grad[3, 4] = bad
        optimizers.set_lr(1e-2)
        optimizers.step(torch.tensor(accept))

    def bits() -> list[bytes]:
        state = [v for values in optimizers.state.values() for v in values.values()]
        tensors = [t.detach().reshape(-1) for t in (*model.parameters(), *state)]
        return [t.view(torch.uint8).numpy().tobytes() for t in tensors]

    step(True)
    before = bits()
    step(False, bad)
    optimizers.uncount_steps(1)
    assert bits() == before
    step(True)
    assert bits() != before
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_bfloat16_weights_and_momentum():
    model, optimizers = build(state_dtype="bfloat16", implementation="for-loop")
    parameter = model.get_parameter("layers.1.attention.wq.weight")
    assert optimizers.state[parameter][MOMENTUM].dtype == torch.bfloat16
    model, optimizers = build()
    parameter = model.get_parameter("layers.1.attention.wq.weight")
    assert optimizers.state[parameter][MOMENTUM].dtype == torch.float32
