"""Sophia's update is the paper's, and its labels are samples of the model's predictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from titanlite.data.random_bits import mix
from titanlite.labels import DOCUMENT_END, IGNORE_INDEX
from titanlite.models.label_sampling import (
    add_noise,
    draw_labels,
    mix_int64,
    sampling_keys,
)
from titanlite.optim.sophia import Sophia


def build(**options):
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    options = {"betas": (0.9, 0.99), "eps": 1e-12, "gamma": 0.05, **options}
    return parameter, Sophia([{"params": [parameter]}], lr=0.1, frequency=10, **options)


def test_the_update_is_that_of_the_paper():
    """Algorithm 3 in float64: theta -= lr (wd theta + clip(m / max(gamma h, eps), 1))."""
    parameter, optimizer = build(weight_decay=0.2)
    theta, m, h = parameter.detach().double(), 0.0, 0.0
    for step in range(4):
        sampled, grad = (torch.tensor([1e-3, -5.0, 0.3, 0.0]) * (step + n) for n in (1, 2))
        if step % 2 == 0:
            parameter.grad = sampled
            optimizer.update_hessian(torch.tensor(64), None)
            h = 0.99 * h + 0.01 * 64 * sampled.double() ** 2
        parameter.grad = grad
        optimizer.step()
        m = 0.9 * m + 0.1 * grad.double()
        ratio = m / (0.05 * h).clamp(min=1e-12)
        theta = theta - 0.1 * 0.2 * theta - 0.1 * ratio.clamp(-1, 1)
        assert (ratio.abs() > 1).any() and (ratio.abs() < 1).any()
        torch.testing.assert_close(parameter.detach().double(), theta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accept, expected", [(False, [0, 0, 0, 0]), (True, [0.64, 0, 0, 0])])
def test_a_rejected_step_and_inf_or_nan_change_no_bit_of_the_hessian(accept, expected):
    """The guard has not judged the gradients of the estimate; with inf, a weight never changes."""
    parameter, optimizer = build()
    parameter.grad = torch.tensor([1.0, torch.nan, torch.inf, 1e30])
    optimizer.update_hessian(torch.tensor(64), torch.tensor(accept))
    assert optimizer.state[parameter]["hessian"].tolist() == pytest.approx(expected)


def test_labels_are_drawn_from_the_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0])
    samples = 200_000
    keys = sampling_keys(3, 0, torch.zeros(samples // 100, 100, dtype=torch.int64)).flatten()
    drawn = draw_labels(logits.expand(samples, -1), keys, 0, lambda whole: whole)
    counts = torch.bincount(drawn, minlength=5).double()
    expected = samples * logits.double().softmax(0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 18.5  # 0.1 % of such samples have more, with 4 degrees of freedom


def test_the_noise_of_a_shard_of_the_vocabulary_is_that_of_the_whole():
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    keys = sampling_keys(3, 0, torch.zeros(5, 10, dtype=torch.int64)).flatten()
    whole, ids = add_noise(logits, keys, 0)
    parts = [add_noise(logits[:, first : first + 4], keys, first) for first in (0, 4, 8)]
    best, shard = torch.stack([part[0] for part in parts]).max(0)
    assert torch.equal(best, whole)
    assert torch.equal(torch.stack([part[1] for part in parts])[shard, torch.arange(50)], ids)


@pytest.mark.parametrize("rows", [slice(0, 2), slice(2, 5)])
def test_keys_depend_on_the_position_of_a_sequence_and_ignored_labels_stay(rows):
    labels = torch.zeros(5, 6, dtype=torch.int64)
    labels[1:3, 2], labels[3, 4] = IGNORE_INDEX, DOCUMENT_END
    keys = sampling_keys(3, 10, labels)
    assert torch.equal(sampling_keys(3, 10 + rows.start, labels[rows]), keys[rows])
    assert torch.equal(keys < 0, labels < 0)
    assert torch.equal(keys[keys < 0], labels[labels < 0])
    assert len(keys[keys >= 0].unique()) == 27
    assert not torch.equal(sampling_keys(4, 10, labels), keys)


def test_integers_are_mixed_as_those_of_the_data():
    values = torch.arange(-500, 500) * 0x9E3779B97F4A7
    expected = mix(values.numpy().astype(np.uint64)).astype(np.int64)
    assert np.array_equal(mix_int64(values).numpy(), expected)
