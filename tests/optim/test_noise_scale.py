"""The gradient noise scale is estimated without bias, and its averages survive a restart."""

from __future__ import annotations

import json

import pytest
import torch

from titanlite.meters.noise_scale import NoiseEstimate, NoiseScale, estimate_noise
from titanlite.optim import OptimizerSet
from titanlite.training.state import TrainState

ELEMENTS, GRADIENT_SQUARE, NOISE = 1000, 0.25, 40.0  # B_simple is 160 sequences


def measured(batch: int, steps: int) -> NoiseScale:
    """The noise scale of sequences whose gradients have a known mean and covariance."""
    generator, average = torch.Generator().manual_seed(1), NoiseScale(decay=0.99)
    mean = torch.full((ELEMENTS,), (GRADIENT_SQUARE / ELEMENTS) ** 0.5)
    spread = torch.linspace(0.5, 1.5, ELEMENTS)  # the elements have unequal noise
    spread *= (NOISE / spread.square().sum()).sqrt()
    for _ in range(steps):
        noise = torch.randn(batch, ELEMENTS, generator=generator)
        gradients = mean + spread * noise
        small, large = gradients[: batch // 2].mean(0), gradients.mean(0)
        squares = (small.square().sum().item(), large.square().sum().item())
        average.update(estimate_noise(squares[0], batch // 2, squares[1], batch))
    return average


@pytest.mark.parametrize("batch", [16, 17, 64])
def test_a_known_noise_scale_is_found_within_10_percent(batch):
    average = measured(batch, steps=1000)
    assert average.mean.gradient == pytest.approx(GRADIENT_SQUARE, rel=0.1)
    assert average.mean.noise == pytest.approx(NOISE, rel=0.02)
    assert average.critical_batch == pytest.approx(NOISE / GRADIENT_SQUARE, rel=0.1)


def test_noise_that_hides_the_gradient_gives_no_critical_batch():
    average = NoiseScale()
    average.update(estimate_noise(small_square=3.0, small_batch=4, large_square=1.0, large_batch=8))
    assert average.mean.gradient < 0 < average.mean.noise
    assert average.critical_batch is None


def test_the_averages_continue_from_a_checkpoint():
    average = measured(16, steps=3)
    restored = NoiseScale(decay=0.99)
    restored.restore(json.loads(json.dumps(average.state())))
    assert restored == average and restored.critical_batch == average.critical_batch
    restored.restore(None)  # rolled back to a checkpoint without measurements
    assert restored == NoiseScale(decay=0.99)


def test_a_checkpoint_without_averages_discards_those_of_the_process():
    """As a roll-back to a checkpoint from before the noise scale was measured."""
    average = NoiseScale()
    state = TrainState(torch.nn.Linear(1, 1), OptimizerSet([], 1.0), parts={"noise_scale": average})
    progress = TrainState(torch.nn.Linear(1, 1), OptimizerSet([], 1.0)).progress()
    average.update(NoiseEstimate(gradient=1.0, noise=2.0))
    state.restore(progress)
    assert average == NoiseScale()
