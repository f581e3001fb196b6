"""What ring attention is built of on a GPU: FlashAttention by its inner name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from titanlite.kernels.flash import CudaFlash, EagerAttention, flash_kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [8, 2])
def test_flash_is_sdpa_with_the_sum_of_scores(causal, key_heads):
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(2, 8, 256, 64, **options, requires_grad=True)
    k = torch.randn(2, key_heads, 256, 64, **options, requires_grad=True)
    v = torch.randn(2, key_heads, 256, 64, **options, requires_grad=True)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    gradient = torch.randn_like(right)
    right.backward(gradient)
    plain = [part.detach() for part in (q, k, v)]
    assert isinstance(flash_kernel_for(q), CudaFlash)
    out, lse = CudaFlash().forward(*plain, causal)
    assert (out - right).abs().max() < 2e-2
    exact = [part.float() for part in plain]
    _, exact_lse = EagerAttention().forward(*exact, causal)
    assert (lse - exact_lse).abs().max() < 2e-2
    for found, part in zip(
        CudaFlash().backward(gradient, *plain, out, lse, causal), (q, k, v), strict=True
    ):
        assert found.shape == part.shape
        assert (found - part.grad).abs().max() < 3e-2 * part.grad.abs().max()


def test_fp32_on_a_gpu_has_a_way_too():
    assert isinstance(flash_kernel_for(torch.empty(1, 1, 1, 64, device="cuda")), EagerAttention)
