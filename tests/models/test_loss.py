"""The fused loss equals cross-entropy of all logits, without storing all of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.parallelize.memory import measure_allocations
from titanlite.labels import IGNORE_INDEX
from titanlite.models import LossConfig, OutputLayer

SEQUENCES, LENGTH, WIDTH, IDS = 3, 20, 16, 61
TOKENS = SEQUENCES * LENGTH


def random_inputs(dtype=torch.float32, **config):
    """(output layer, hidden states, labels of which some are ignored)."""
    torch.manual_seed(0)
    output = OutputLayer(WIDTH, IDS).to(dtype)
    output.config = LossConfig(**config)
    x = torch.randn(SEQUENCES, LENGTH, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, IDS, (SEQUENCES, LENGTH))
    labels[0, :7] = labels[2] = IGNORE_INDEX
    return output, x, labels


def reference_loss(output: OutputLayer, x, labels, z_loss=0.0):
    logits = F.linear(x, output.weight).flatten(0, 1).float()
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    squares = logits.logsumexp(-1).square() * (labels.flatten() != IGNORE_INDEX)
    return loss + z_loss * squares.sum()


def loss_and_grads(output, x, loss) -> tuple[float, torch.Tensor, torch.Tensor]:
    x.grad = output.weight.grad = None
    (loss / 60).backward()
    return loss.item(), x.grad, output.weight.grad


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [0, 1, 7, LENGTH, TOKENS, 1000])
def test_every_chunk_size_gives_the_loss_and_gradients_of_all_logits(chunk, z_loss):
    output, x, labels = random_inputs(chunk_tokens=chunk, z_loss=z_loss)
    expected = loss_and_grads(output, x, reference_loss(output, x, labels, z_loss))
    actual = loss_and_grads(output, x, output(x, labels=labels))
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    for a, b in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
    z_part = expected[0] - reference_loss(output, x, labels).item()
    own, z_loss = output.last_terms.tolist()
    assert z_loss == pytest.approx(z_part, rel=1e-5, abs=1e-5)
    assert own + z_loss == pytest.approx(expected[0], rel=1e-6)


def test_the_loss_of_further_tokens_changes_no_bit_of_the_logged_one():
    output, x, labels = random_inputs(chunk_tokens=7, mtp_weight=1e5)
    output(x, labels=labels)
    alone = output.last_terms[0].item()
    output(torch.cat((x, x + 1)), labels=torch.cat((labels, labels)), depths=1)
    assert output.last_terms[0].item() == alone


def test_a_validation_loss_does_not_include_z_loss():
    output, x, labels = random_inputs(z_loss=0.3)
    with torch.no_grad():
        assert output(x, labels=labels).item() == pytest.approx(
            reference_loss(output, x, labels).item()
        )
    assert output.last_terms[1] == 0


def test_the_loss_that_is_compiled_equals_the_eager_one():
    output, x, labels = random_inputs(torch.bfloat16, chunk_tokens=17, z_loss=0.3)
    eager = loss_and_grads(output, x, output(x, labels=labels))
    output.vocabulary.compile(backend="eager", dynamic=False)
    compiled = loss_and_grads(output, x, output(x, labels=labels))
    assert compiled[0] == pytest.approx(eager[0], rel=1e-6)
    for a, b in zip(compiled[1:], eager[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-8, atol=1e-6)  # one rounding to bf16


def test_bf16_gradients_are_rounded_once():
    """If the factor 1/60 were rounded to bf16, all gradients would be off by up to 0.4 %."""
    output, x, labels = random_inputs(torch.bfloat16, chunk_tokens=TOKENS)
    _, dx, dw = loss_and_grads(output, x, output(x, labels=labels))
    assert dx.dtype == dw.dtype == torch.bfloat16
    (unscaled,) = torch.autograd.grad(output(x, labels=labels), x)
    ratio = dx.double().abs().sum() / unscaled.double().abs().sum()
    assert ratio.item() == pytest.approx(1 / 60, rel=1.5e-3)


@pytest.mark.parametrize("dtype, copies", [(torch.float32, 1.05), (torch.bfloat16, 1.55)], ids=str)
def test_memory_holds_the_logits_of_one_chunk_only(dtype, copies):
    tokens, ids, chunk = 512, 4096, 64
    output, x = OutputLayer(8, ids).to(dtype), torch.randn(1, tokens, 8).to(dtype).requires_grad_()
    labels = torch.randint(0, ids, (1, tokens))
    peaks = {}
    for size in (0, chunk):
        output.config = LossConfig(chunk_tokens=size)
        peaks[size], _ = measure_allocations(lambda: output(x, labels=labels))
    print({size: f"{peak / 2**20:.2f} MiB" for size, peak in peaks.items()})  # pytest -rP
    # one copy in fp32, and one in the weights' dtype for the matmul result and the gradient
    assert peaks[0] <= copies * tokens * ids * 4
    assert peaks[chunk] <= copies * chunk * ids * 4 + 2.1 * output.weight.numel() * 4


@pytest.mark.parametrize("tokens, chunk, channel", [(2**15, 0, 4.0), (4096, 4096, 17.0)])
def test_fp16_weight_gradients_overflow_only_if_the_mean_overflows(tokens, chunk, channel):
    """Before the division by the tokens, the weight gradient reaches 131,072 and 69,632 here, above
    float16's maximum; after it, 4 and 17."""
    torch.manual_seed(0)
    output, x = OutputLayer(8, 64), torch.randn(1, tokens, 8) * 0.1
    output.config, x[..., 0] = LossConfig(chunk_tokens=chunk), channel
    labels = torch.zeros(1, tokens, dtype=torch.int64)

    def weight_grad(dtype):
        output.to(dtype).weight.grad = None
        (output(x.to(dtype), labels=labels) / tokens).backward()
        return output.weight.grad.float().clone()  # output.to changes it in place

    expected, actual = weight_grad(torch.float32), weight_grad(torch.float16)
    assert expected.abs().max() > channel / 2
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4 * channel)


def test_without_labels_it_returns_logits():
    output, x, _ = random_inputs()
    assert torch.equal(output(x), F.linear(x, output.weight))
