"""The grouped kernel of torch, with the groups that routers make: uneven, empty and of one row."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from titanlite.kernels.grouped import (
    FLOAT8_CAPABILITY,
    Float8Cast,
    grouped_matmul,
    grouped_matmuls,
    has_grouped_kernel,
    row_groups,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

COUNTS = {
    "uneven": [5, 300, 17, 64, 1200],
    "empty": [0, 40, 0, 0, 24, 0],
    "of one row": [1, 1, 1, 61],
    "no rows": [0, 0, 0],
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_grouped_kernel_is_a_matmul_per_expert(name):
    torch.manual_seed(0)
    counts = COUNTS[name]
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x = draw(sum(counts), 256, requires_grad=True)
    weight = draw(len(counts), 128, 256, requires_grad=True)
    grad = draw(len(x), 128)
    if not has_grouped_kernel(x, weight):
        pytest.skip("this GPU has no grouped kernel")
    groups = row_groups(torch.tensor(counts, device="cuda"), x, weight)
    assert (groups.on_host is None) == (name != "no rows")
    torch.full_like(weight, torch.nan)  # the gradient may get this memory, which is freed here
    out = grouped_matmul(x, weight, groups)
    x_grad, weight_grad = torch.autograd.grad(out, (x, weight), grad)
    # rounded to bfloat16 once
    close = partial(torch.testing.assert_close, rtol=2**-7, atol=1e-2)
    by_expert = [each.split(counts) for each in (x, out, grad, x_grad)]
    for expert, rows in enumerate(zip(*by_expert, strict=True)):
        own_x, own_out, own_grad, own_x_grad = (each.float() for each in rows)
        close(own_out, own_x @ weight[expert].float().T)
        close(own_x_grad, own_grad @ weight[expert].float())
        close(weight_grad[expert].float(), own_grad.T @ own_x)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", COUNTS)
def test_the_float8_kernel_computes_what_emulation_computes(name, compiled):
    """They round the same operands; the sums of forward may have less precision than fp32."""
    if torch.cuda.get_device_capability() != FLOAT8_CAPABILITY:
        pytest.skip("this GPU has no grouped kernel of Float8")
    torch.manual_seed(0)
    counts = torch.tensor(COUNTS[name], device="cuda")
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x = draw(int(counts.sum()), 256, requires_grad=True)
    weights = [draw(len(counts), n, 256, requires_grad=True) for n in (128, 48)]
    grads, groups = [draw(len(x), n) for n in (128, 48)], row_groups(counts, x, *weights)
    results = []
    for cast in (Float8Cast(emulate=False), Float8Cast(emulate=True)):
        if compiled:
            cast.compile(partial(torch.compile, fullgraph=True))
        outs = grouped_matmuls(x, tuple(weights), groups, cast)
        results.append([*outs, *torch.autograd.grad(outs, (x, *weights), grads)])
    for actual, emulated in zip(*results, strict=True):
        assert actual.shape == emulated.shape and actual.isfinite().all()
        error = (actual.float() - emulated.float()).norm()
        assert error <= 1e-2 * emulated.float().norm()
