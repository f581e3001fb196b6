"""The ATen FlashAttention operators that ring attention is built on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlite.kernels.flash import CudaFlash, EagerAttention, flash_kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_flash_matches_sdpa_and_returns_the_log_sum_exp(causal, n_kv_heads):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for heads in (8, n_kv_heads, n_kv_heads)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    assert isinstance(flash_kernel_for(q), CudaFlash)
    with torch.no_grad():
        out, lse = CudaFlash().forward(q, k, v, causal)
        _, expected_lse = EagerAttention().forward(q.float(), k.float(), v.float(), causal)
        grads = CudaFlash().backward(grad, q, k, v, out, lse, causal)
    assert (out - expected).abs().max() < 2e-2
    assert (lse - expected_lse).abs().max() < 2e-2
    for actual, tensor in zip(grads, (q, k, v), strict=True):
        assert actual.shape == tensor.shape and tensor.grad is not None
        assert (actual - tensor.grad).abs().max() < 3e-2 * tensor.grad.abs().max()


def test_fp32_on_a_gpu_uses_eager_attention():
    assert isinstance(flash_kernel_for(torch.empty(1, 1, 1, 64, device="cuda")), EagerAttention)
