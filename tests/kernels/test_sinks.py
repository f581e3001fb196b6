"""Attention sinks: a logit of each head in the denominator of the softmax, in every kernel."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from titanlite.errors import ConfigError
from titanlite.kernels import documents as documents_module
from titanlite.kernels.attention import CausalAttention, KeyValueCache
from titanlite.kernels.backend import (
    AttentionConfig,
    AttentionShape,
    check_attention_config,
    choose_kernel,
)
from titanlite.kernels.documents import index_documents
from titanlite.kernels.flash import (
    CpuFlash,
    CudaFlash,
    EagerAttention,
    window_mask,
)
from titanlite.settings import raise_together

TOKENS, WINDOW = 24, 5
POSITIONS = {
    "one document": torch.arange(TOKENS).expand(2, -1),
    "documents": torch.stack([torch.arange(TOKENS) % 9, torch.arange(TOKENS) % 13]),
}


def random_inputs() -> list[Tensor]:
    """q, k, v as a model makes them, sinks, and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, TOKENS, heads, 8).transpose(1, 2) for heads in (4, 2, 2, 4))
    return [q, k, v, torch.randn(4), grad]


def softmax_with_sinks(q, k, v, sinks, mask) -> Tensor:
    """By the definition: the softmax over all scores and the sink, without the sink's column."""
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    column = sinks.view(-1, 1, 1).expand(len(q), -1, q.shape[2], -1)
    scores = torch.cat([scores.masked_fill(~mask, -torch.inf), column], -1)
    return scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)


def expected_of(inputs: list[Tensor], positions: Tensor, window: int) -> list[Tensor]:
    """The output and the gradients of q, k, v and the sinks, in fp64."""
    *leaves, grad = (tensor.double() for tensor in inputs)
    starts = torch.arange(TOKENS) - positions  # of the document of each token
    mask = window_mask(*leaves[:2], 0, window or TOKENS)
    mask = mask & (starts.unsqueeze(2) == starts.unsqueeze(1))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = softmax_with_sinks(*leaves, mask.unsqueeze(1))
    return [out, *torch.autograd.grad(out, leaves, grad)]


def flash_forward(q, k, v, starts, key_starts, longest, _, dropout, causal, debug, **window):
    """What FlashAttention returns for packed documents: [T, H, K], and the lse [H, T]."""
    assert torch.equal(starts, key_starts) and starts.dtype == torch.int32 and not debug
    assert longest >= starts.diff().max() and causal == (window["window_size_left"] == -1)
    parts = [
        EagerAttention().forward(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), mask)
        for a, b, mask in masks_of(q, starts, **window)
    ]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2)[0].transpose(0, 1).contiguous(), torch.cat(lses, 2)[0], *[None] * 3


def flash_backward(
    grad, q, k, v, out, lse, starts, _, longest, __, dropout, causal, ___, ____, **window
):
    assert lse.is_contiguous() and lse.shape == (4, len(q)) and lse.dtype == torch.float32
    grads = [
        EagerAttention().backward(
            *(x[a:b].transpose(0, 1)[None] for x in (grad, q, k, v, out)), lse[None, :, a:b], mask
        )
        for a, b, mask in masks_of(q, starts, **window)
    ]
    return [torch.cat(parts, 2)[0].transpose(0, 1) for parts in zip(*grads, strict=True)]


def masks_of(q, starts, window_size_left, window_size_right):
    """(first token, end, mask) of each document."""
    assert window_size_right == 0
    for a, b in pairwise(starts.tolist()):
        rows = q[a:b].transpose(0, 1)[None]
        yield a, b, window_mask(rows, rows, 0, window_size_left + 1 or b - a)


@pytest.mark.parametrize("kernel", ["CPU", "a GPU without FlashAttention", "FlashAttention"])
@pytest.mark.parametrize("window", [0, WINDOW], ids=["no window", "window"])
@pytest.mark.parametrize("documents", POSITIONS)
def test_sinks_are_in_the_denominator_in_every_kernel(monkeypatch, documents, window, kernel):
    kernels = {"a GPU without FlashAttention": EagerAttention(), "FlashAttention": CudaFlash()}
    if kernel != "CPU":
        monkeypatch.setattr(documents_module, "flash_kernel_for", lambda q: kernels[kernel])
    operators = {
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
    }
    for name, operator in operators.items():
        monkeypatch.setattr(torch.ops.aten, name, operator)
    *leaves, grad = inputs = random_inputs()
    q, k, v, sinks = (leaf.requires_grad_() for leaf in leaves)
    positions = POSITIONS[documents]
    index = index_documents(positions) if documents == "documents" else None
    attend = CausalAttention(window=window, sinks=4)
    attend.sinks.forward = lambda: sinks
    out = attend(q, k, v, index)
    grads = torch.autograd.grad(out, (q, k, v, sinks), grad)
    for a, b in zip([out, *grads], expected_of(inputs, positions, window), strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 2e-6 * b.abs().max()


def test_generation_with_a_cache_has_sinks_too():
    q, k, v, sinks, _ = inputs = random_inputs()
    attend, cache = CausalAttention(window=WINDOW, sinks=4), KeyValueCache(TOKENS)
    attend.sinks.forward = lambda: sinks
    parts = [attend(*(x[:, :, :7] for x in (q, k, v)), None, cache)]
    for t in range(7, TOKENS):
        parts.append(attend(*(x[:, :, t : t + 1] for x in (q, k, v)), None, cache))
    expected, *_ = expected_of(inputs, POSITIONS["one document"], WINDOW)
    assert (torch.cat(parts, 2) - expected).abs().max() < 1e-6


def test_only_kernels_that_return_the_log_sum_exp_compute_sinks():
    with pytest.raises(ConfigError, match='"math": cannot be used with attention sinks.*fa4'):
        raise_together([*check_attention_config(AttentionConfig("math"), 1, None, sinks=True)])
    config, shape = AttentionConfig("flash"), AttentionShape(2, 4, 2, 16, 8, sinks=True)
    assert not [*check_attention_config(config, 1, None, sinks=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuFlash, "backward", None)  # not that of SDPA: it has no sinks
        with pytest.raises(ConfigError, match="another of flash, fa3, fa4"):
            choose_kernel(config, shape, torch.float32, torch.device("cpu"))
    assert choose_kernel(config, shape, torch.float32, torch.device("cpu")) == "flash"
