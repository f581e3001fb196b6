"""The ATen operators of attention with a log-sum-exp, which context parallel is built on."""

from __future__ import annotations

import pytest
import torch

from titanlite.kernels.backend import (
    CONTEXT_PARALLEL_KERNELS,
    AttentionConfig,
    AttentionShape,
    activate_flash_package,
    choose_kernel,
    deactivate_flash_package,
)
from titanlite.kernels.flash import EagerAttention, flash_kernel_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

RANKS, TOKENS = 2, 512  # of context parallel; of a rank, half of them in each of two chunks


def random_heads(n_heads: int) -> torch.Tensor:
    """[B, H, T, K], stored as [B, T, H, K], as in training."""
    shape = (2, TOKENS, n_heads, 64)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() < 2e-2 * expected.abs().max()


@pytest.fixture(params=CONTEXT_PARALLEL_KERNELS)
def kernel_name(request):
    """A kernel that can run here, active."""
    name = request.param
    shape = AttentionShape(2, n_heads=8, n_kv_heads=2, seq_len=RANKS * TOKENS, head_dim=64)
    config, device = AttentionConfig(backend=name), torch.device("cuda")
    try:
        choose_kernel(config, shape, torch.bfloat16, device, context_degree=RANKS)
    except Exception as reason:
        pytest.skip(str(reason))
    activate_flash_package(name)
    yield name
    deactivate_flash_package()


FIRST, SECOND, ALL = slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS), slice(None)
TILES = {  # name -> (queries, keys, causal): see parallelize/context_tiles.py
    "own": (ALL, ALL, True),
    "keys of an earlier rank": (ALL, FIRST, False),
    "keys of a later rank": (SECOND, ALL, False),
    "one chunk": (FIRST, FIRST, True),
}


@pytest.mark.parametrize("n_kv_heads", [8, 2])
@pytest.mark.parametrize("tile", TILES)
def test_every_kernel_matches_matmuls_in_fp32(kernel_name, tile, n_kv_heads):
    torch.manual_seed(0)
    queries, keys, causal = TILES[tile]
    q = random_heads(8)[:, :, queries]
    # Keys and values arrive in one contiguous tensor.
    k, v = torch.stack([random_heads(n_kv_heads) for _ in range(2)])[:, :, :, keys]
    kernel, eager = flash_kernel_for(q, kernel_name == "cudnn"), EagerAttention()
    inputs = q.float(), k.float(), v.float()
    expected, expected_lse = eager.forward(*inputs, causal)
    out, lse = kernel.forward(q, k, v, causal)
    assert_close(out, expected)
    assert lse.shape == expected_lse.shape and (lse - expected_lse).abs().max() < 1e-2
    for grad in (torch.randn_like(q), torch.randn_like(expected).to(q.dtype).contiguous()):
        # The second is stored in another order. As in a ring, the output and the log-sum-exp may
        # cover more keys than the tile: here as many again, with a score of -1 each.
        more = torch.logaddexp(expected_lse, torch.full_like(expected_lse, -1.0))
        merged = expected * (expected_lse - more).exp().unsqueeze(-1)
        merged_out = torch.empty_like(q).copy_(merged)
        grads = kernel.backward(grad, q, k, v, merged_out, more, causal)
        wanted = eager.backward(grad.float(), *inputs, merged_out.float(), more, causal)
        for actual, reference in zip(grads, wanted, strict=True):
            assert_close(actual, reference)


def test_fp32_on_a_gpu_uses_eager_attention():
    assert isinstance(flash_kernel_for(torch.empty(1, 1, 1, 64, device="cuda")), EagerAttention)
