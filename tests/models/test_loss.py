"""The loss is the plain cross-entropy of whole logits, which are never there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.parallelize.memory import measure_allocations
from titanlite.labels import IGNORE_INDEX
from titanlite.models import LossConfig, OutputLayer

ROWS, LENGTH, WIDTH, IDS = 3, 20, 16, 61
TOKENS = ROWS * LENGTH


def drawn(dtype=torch.float32, **config):
    """(output layer, hidden states, labels of which the first rows are ignored)."""
    torch.manual_seed(0)
    output = OutputLayer(WIDTH, IDS).to(dtype)
    output.loss = LossConfig(**config)
    x = torch.randn(ROWS, LENGTH, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, IDS, (ROWS, LENGTH))
    labels[0, :7] = labels[2] = IGNORE_INDEX
    return output, x, labels


def plain(output: OutputLayer, x, labels, z_loss=0.0):
    logits = F.linear(x, output.weight).flatten(0, 1).float()
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    squares = logits.logsumexp(-1).square() * (labels.flatten() != IGNORE_INDEX)
    return loss + z_loss * squares.sum()


def learned(output, x, loss) -> tuple[float, torch.Tensor, torch.Tensor]:
    x.grad = output.weight.grad = None
    (loss / 60).backward()
    return loss.item(), x.grad, output.weight.grad


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [0, 1, 7, LENGTH, TOKENS, 1000])
def test_every_chunk_gives_the_loss_and_the_gradients_of_whole_logits(chunk, z_loss):
    output, x, labels = drawn(chunk_tokens=chunk, z_loss=z_loss)
    right = learned(output, x, plain(output, x, labels, z_loss))
    found = learned(output, x, output(x, labels=labels))
    assert found[0] == pytest.approx(right[0], rel=1e-6)
    for mine, theirs in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-8)
    of_z = right[0] - plain(output, x, labels).item()
    assert output.z_loss.item() == pytest.approx(of_z, rel=1e-5, abs=1e-5)


def test_the_loss_of_a_validation_has_no_z_loss_in_it():
    output, x, labels = drawn(z_loss=0.3)
    with torch.no_grad():
        assert output(x, labels=labels).item() == pytest.approx(plain(output, x, labels).item())
    assert output.z_loss == 0


def test_labels_that_do_not_count_teach_nothing():
    output, x, labels = drawn(chunk_tokens=7)
    loss, dx, dw = learned(output, x, output(x, labels=torch.full_like(labels, IGNORE_INDEX)))
    assert loss == 0 and not dx.any() and not dw.any()


def test_gradients_in_bf16_are_rounded_once():
    """A factor that was rounded to bf16 first would be off by up to 0.4 % everywhere."""
    output, x, labels = drawn(torch.bfloat16, chunk_tokens=TOKENS)
    _, dx, dw = learned(output, x, output(x, labels=labels))
    assert dx.dtype == dw.dtype == torch.bfloat16
    (whole,) = torch.autograd.grad(output(x, labels=labels), x)
    share = dx.double().abs().sum() / whole.double().abs().sum()
    assert share.item() == pytest.approx(1 / 60, rel=1.5e-3)


@pytest.mark.parametrize("dtype, copies", [(torch.float32, 1.05), (torch.bfloat16, 1.55)], ids=str)
def test_no_more_logits_are_held_than_those_of_a_chunk(dtype, copies):
    tokens, ids, chunk = 512, 4096, 64
    output, x = OutputLayer(8, ids).to(dtype), torch.randn(1, tokens, 8).to(dtype).requires_grad_()
    labels = torch.randint(0, ids, (1, tokens))
    most = {}
    for size in (0, chunk):
        output.loss = LossConfig(chunk_tokens=size)
        most[size], _ = measure_allocations(lambda: output(x, labels=labels))
    print({size: f"{peak / 2**20:.2f} MiB" for size, peak in most.items()})  # pytest -rP
    # once in fp32, and, as they come and as their gradient goes, in the type of the weights
    assert most[0] <= copies * tokens * ids * 4
    assert most[chunk] <= copies * chunk * ids * 4 + 2.1 * output.weight.numel() * 4


@pytest.mark.parametrize("tokens, chunk, channel", [(2**15, 0, 4.0), (4096, 4096, 17.0)])
def test_in_fp16_a_sum_over_tokens_overflows_only_where_their_mean_does(tokens, chunk, channel):
    """The weights' gradient, summed before it is divided, reaches 131,072 and 69,632 here; that of
    the mean loss, which any loss scale may begin from, 4 and 17."""
    torch.manual_seed(0)
    output, x = OutputLayer(8, 64), torch.randn(1, tokens, 8) * 0.1
    output.loss, x[..., 0] = LossConfig(chunk_tokens=chunk), channel
    labels = torch.zeros(1, tokens, dtype=torch.int64)

    def gradient(dtype):
        output.to(dtype).weight.grad = None
        (output(x.to(dtype), labels=labels) / tokens).backward()
        return output.weight.grad.float().clone()  # a change of type changes it in place

    right, found = gradient(torch.float32), gradient(torch.float16)
    assert right.abs().max() > channel / 2
    torch.testing.assert_close(found, right, rtol=5e-3, atol=1e-3 * channel)


def test_without_labels_it_is_the_plain_layer():
    output, x, _ = drawn()
    assert torch.equal(output(x), F.linear(x, output.weight))
