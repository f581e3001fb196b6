"""The chunked gated delta rule is the recurrence, and documents do not see each other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from titanlite.kernels.delta_rule import gated_delta_rule, short_convolution


def recurrence(q, k, v, log_decay, beta, starts, state):
    """Token by token, as written in the paper."""
    q, k = (tensor.repeat_interleave(v.shape[2] // k.shape[2], 2) for tensor in (q, k))
    outs = []
    for t in range(v.shape[1]):
        kept = log_decay[:, t].exp() * ~starts[:, t, None]
        state = state * kept[..., None, None]
        change = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(-2))
        state = state + k[:, t, ..., None] * change.unsqueeze(-2)
        outs.append((state * q[:, t, ..., None]).sum(-2))
    return torch.stack(outs, 1), state


def random_inputs(tokens: int, decay: float, dtype=torch.float64):
    torch.manual_seed(0)
    q, k = torch.randn(2, tokens, 2, 8), F.normalize(torch.randn(2, tokens, 2, 8), dim=-1)
    v, beta = torch.randn(2, tokens, 6, 12), torch.rand(2, tokens, 6)
    forgets = torch.rand(2, tokens, 6) < 0.3
    log_decay = torch.where(forgets, -decay, -0.01 * torch.rand(2, tokens, 6))
    tensors = (q, k, v, log_decay, beta, torch.randn(2, 6, 8, 12))
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("documents", [0.0, 0.15], ids=["one document", "documents"])
@pytest.mark.parametrize("tokens", [1, 3, 64, 65, 200])
def test_chunks_compute_the_recurrence(tokens, documents):
    *inputs, state = random_inputs(tokens, decay=3.0)
    starts = torch.rand(2, tokens) < documents
    results = gated_delta_rule(*inputs, starts if documents else None, state)
    wanted = recurrence(*inputs, starts, state)
    weights = [torch.randn_like(each) for each in wanted]
    grads, wanted_grads = (
        torch.autograd.grad(r, (*inputs, state), weights) for r in (results, wanted)
    )
    for one, other in zip((*results, *grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_decay_that_forgets_everything_costs_no_digits():
    """Differences of sums of log decays would leave no digit of those behind the large one."""
    *inputs, state = random_inputs(70, 1e7, torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (*inputs, state)]
    starts = torch.zeros(2, 70, dtype=torch.bool)
    results, wanted = (
        gated_delta_rule(*inputs, None, state),
        recurrence(*exact[:5], starts, exact[5]),
    )
    grads = torch.autograd.grad(results[0].sum(), inputs)
    wanted_grads = torch.autograd.grad(wanted[0].sum(), exact[:5])
    for one, other in zip((*results, *grads), (*wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-4)


def test_the_convolution_does_not_look_over_the_start_of_a_document():
    torch.manual_seed(0)
    x, weight, starts = torch.randn(2, 40, 5), torch.randn(5, 4), torch.rand(2, 40) < 0.3
    out = short_convolution(x, weight, torch.randn(2, 3, 5), starts)
    for row in range(2):
        bounds = [*starts[row].nonzero().flatten().tolist(), 40]
        for first, end in pairwise(bounds):
            document = F.pad(x[row, first:end].T, (3, 0))
            wanted = F.silu(F.conv1d(document[None], weight[:, None], groups=5))[0].T
            torch.testing.assert_close(out[row, first:end], wanted)

    whole = short_convolution(x, weight, torch.zeros(2, 3, 5))
    torch.testing.assert_close(whole[:, 20:], short_convolution(x[:, 20:], weight, x[:, 17:20]))
