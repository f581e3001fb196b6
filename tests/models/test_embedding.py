"""The gradient of a frequent token is a sum of many; none of them is lost to rounding."""

from __future__ import annotations

import pytest
import torch

from titanlite.models import TokenEmbedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("times", [2000, 16_384])
def test_a_token_that_comes_often_gets_the_sum_of_its_gradients(times, dtype):
    """Added one by one in bfloat16 they were off by up to 48 % and 93 %."""
    torch.manual_seed(0)
    embedding = TokenEmbedding(10, 32).to(dtype)
    tokens = torch.cat([torch.full((times,), 3), torch.tensor([0, 9, 9])])
    gradient = (torch.randn(len(tokens), 32) + 1).to(dtype)
    embedding(tokens).backward(gradient)
    right = torch.zeros(10, 32, dtype=torch.float64).index_add_(0, tokens, gradient.double())
    found = embedding.weight.grad
    assert found.dtype == dtype
    rounded_once = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(found.double(), right, rtol=rounded_once, atol=5e-3)


def test_it_looks_up_what_the_plain_layer_looks_up():
    embedding, tokens = TokenEmbedding(10, 4).bfloat16(), torch.tensor([[3, 0], [9, 9]])
    assert torch.equal(embedding(tokens), embedding.weight[tokens])
