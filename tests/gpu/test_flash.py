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
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 8, 256, 64, **options, requires_grad=True)
    k = torch.randn(2, n_kv_heads, 256, 64, **options, requires_grad=True)
    v = torch.randn(2, n_kv_heads, 256, 64, **options, requires_grad=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    detached = [tensor.detach() for tensor in (q, k, v)]
    assert isinstance(flash_kernel_for(q), CudaFlash)
    out, lse = CudaFlash().forward(*detached, causal)
    assert (out - expected).abs().max() < 2e-2
    in_fp32 = [tensor.float() for tensor in detached]
    _, expected_lse = EagerAttention().forward(*in_fp32, causal)
    assert (lse - expected_lse).abs().max() < 2e-2
    grads = CudaFlash().backward(grad, *detached, out, lse, causal)
    for actual, tensor in zip(grads, (q, k, v), strict=True):
        assert actual.shape == tensor.shape
        assert (actual - tensor.grad).abs().max() < 3e-2 * tensor.grad.abs().max()


def test_fp32_on_a_gpu_uses_eager_attention():
    assert isinstance(flash_kernel_for(torch.empty(1, 1, 1, 64, device="cuda")), EagerAttention)
