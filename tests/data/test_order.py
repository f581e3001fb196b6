"""Sample order: no sample is lost or repeated, whatever slices are read."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest

from titanlite.data.mixture import BLOCK, MixtureQuotas
from titanlite.data.order import SampleOrder, permute
from titanlite.errors import DataError

MIXTURE = [("code", 0.7, 1000), ("prose", 0.25, 333), ("mathematics", 0.05, 7)]
HALVES = [("code", 0.5, 5000), ("prose", 0.375, 4096), ("mathematics", 0.125, 70_000)]
KNOWN_ORDERS = [  # sources, first position, then (source, epoch, sample) of 8
    (
        MIXTURE,
        2 * BLOCK - 4,
        [
            [0, 0, 0, 1, 0, 0, 0, 1],
            [5, 5, 5, 6, 5, 5, 5, 6],
            [887, 320, 511, 59, 794, 348, 638, 129],
        ],
    ),
    (
        HALVES,
        79 * BLOCK - 4,
        [
            [0, 1, 0, 1, 0, 1, 0, 1],
            [32, 29, 32, 29, 32, 29, 32, 29],
            [2494, 401, 2811, 2137, 4804, 4017, 3528, 3572],
        ],
    ),
    (
        [("code", 3.0, 5000)],
        4996,
        [
            [0] * 8,
            [0, 0, 0, 0, 1, 1, 1, 1],
            [3342, 4326, 971, 797, 579, 830, 2808, 1591],
        ],
    ),
]


def sample_at(order: SampleOrder, start: int, stop: int):
    return order.sample_at(np.arange(start, stop))


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4095, 4097, 65_537, 300_007])
def test_permute_is_a_permutation_at_every_size(size):
    for key in (0, 12_345_678_901_234_567_890):
        keys = np.full(size, key, dtype=np.uint64)
        assert np.array_equal(np.sort(permute(np.arange(size), size, keys)), np.arange(size))


def test_permuted_positions_are_not_correlated():
    size = 1 << 16
    index = np.arange(size)
    images = permute(index, size, np.full(size, 3, np.uint64))
    noise = 5 / math.sqrt(size)
    assert abs(np.corrcoef(index, images)[0, 1]) < noise
    for step in (1, 2, 256, 257):
        assert abs(np.corrcoef(images[:-step], images[step:])[0, 1]) < noise
    assert abs(np.mean(np.diff(images) > 0) - 0.5) < noise


def test_every_epoch_has_every_sample_once_in_its_own_order():
    for samples in (1, 10, 4096, 5000):
        _, epoch, sample = sample_at(SampleOrder(5, [("a", 1.0, samples)]), 0, 3 * samples)
        assert np.array_equal(epoch, np.repeat([0, 1, 2], samples))
        epochs = sample.reshape(3, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (3, 1)))
        assert samples < 10 or not np.array_equal(epochs[0], epochs[1])


def test_a_source_of_a_mixture_finishes_an_epoch_before_the_next():
    source, epoch, sample = sample_at(SampleOrder(5, MIXTURE), 0, 3 * BLOCK + 100)
    for number, (_, _, samples) in enumerate(MIXTURE):
        chosen = source == number
        draws = np.arange(chosen.sum())
        assert np.array_equal(epoch[chosen], draws // samples)  # in order of position
        complete = len(draws) // samples * samples
        epochs = sample[chosen][:complete].reshape(-1, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (len(epochs), 1)))


def test_every_block_contains_the_quota_of_each_source():
    order = SampleOrder(1, MIXTURE)
    for block in (0, 1, 77, 10**9):
        source, _, _ = sample_at(order, block * BLOCK, (block + 1) * BLOCK)
        counts = np.bincount(source, minlength=3)
        first, after = (
            order.mixture.segments[0].quotas.count_before(b) for b in (block, block + 1)
        )
        assert counts.tolist() == [b - a for a, b in zip(first, after, strict=True)]
        assert np.abs(counts - BLOCK * np.array([0.7, 0.25, 0.05])).max() < 2


@pytest.mark.parametrize(
    "weights",
    [
        [0.0004, 0.9996],  # rounded to 1/4096 it would be 22 % too much
        [0.0001831, 0.9998169],
        [0.67, 0.15, 0.045, 0.045, 0.045, 0.025, 0.02],
        [1.0, 1e-5, 1e-5, 1e-5, 0.0, 3.0],  # less than one sample in many blocks
        [1 / 3] * 9,
    ],
    ids=str,
)
def test_quotas_are_exact_over_a_run_however_small_the_weight(weights):
    quotas = MixtureQuotas([str(i) for i in range(len(weights))], weights)
    exact = np.array(weights) / sum(weights)
    before = quotas.count_before(0)
    for block in [*range(1, 300), 10**6, 10**9, 2**51]:
        drawn = quotas.count_before(block)
        assert sum(drawn) == block * BLOCK
        assert all(late >= early for late, early in zip(drawn, before, strict=True))
        rounding = block * BLOCK * 1e-15  # of the expected value, computed in floats
        assert np.abs(np.array(drawn) - block * BLOCK * exact).max() < 2 + rounding
        before = drawn


@pytest.mark.slow
def test_a_source_with_a_tiny_weight_still_completes_its_epochs():
    order = SampleOrder(3, [("rare", 1e-5, 10), ("common", 1.0, 10**6)])
    source, epoch, sample = sample_at(order, 0, 500 * BLOCK)
    rare = source == 0
    assert abs(rare.sum() - 500 * BLOCK * 1e-5 / (1 + 1e-5)) < 1
    assert epoch[rare].tolist() == [draw // 10 for draw in range(rare.sum())]
    assert len(set(sample[rare][:10].tolist())) == 10


def frequencies(size: int, permutations: int) -> np.ndarray:
    """How often each permutation of `size` samples occurs as an epoch."""
    _, _, sample = sample_at(SampleOrder(11, [("a", 1.0, size)]), 0, size * permutations)
    codes = sample.reshape(-1, size) @ (size ** np.arange(size))
    return np.unique(codes, return_counts=True)[1]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_order_of_a_small_source_is_uniform_over_all_permutations(size):
    kinds, permutations = math.factorial(size), 24_000
    observed = frequencies(size, permutations)
    expected = permutations / kinds
    assert len(observed) == kinds
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    assert abs(chi_squared - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("size", [16, 100, 1000])
def test_a_small_source_has_no_more_adjacent_pairs_than_chance(size):
    epochs = 800_000 // size
    _, _, sample = sample_at(SampleOrder(5, [("a", 1.0, size)]), 0, size * epochs)
    pairs = (np.diff(sample.reshape(epochs, size), axis=1) == 1).sum()
    expected = epochs * (size - 1) / size  # in a random permutation; close to Poisson
    assert abs(pairs - expected) < 4 * math.sqrt(expected)


def test_every_batch_has_nearly_its_quota_of_every_source():
    source, _, _ = sample_at(SampleOrder(1, MIXTURE), 0, 8 * BLOCK)
    for number, (_, weight, _) in enumerate(MIXTURE):
        in_batches = (source == number).reshape(-1, 64).sum(1)
        assert np.abs(in_batches - 64 * weight).max() < 4


@pytest.mark.parametrize("seed", range(3))
def test_other_slices_give_the_same_samples(seed):
    order, generator = SampleOrder(seed, MIXTURE), np.random.default_rng(seed)
    start, stop = 10**12, 10**12 + 3 * BLOCK
    expected = np.stack(sample_at(order, start, stop))
    bounds = [start, *np.sort(generator.integers(start, stop, 50)), stop]
    parts = [np.stack(sample_at(order, a, b)) for a, b in pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts, axis=1), expected)
    shuffled = generator.permutation(stop - start)
    assert np.array_equal(np.stack(order.sample_at(start + shuffled)), expected[:, shuffled])


@pytest.mark.parametrize("sources, first, expected", KNOWN_ORDERS)
def test_the_order_is_the_recorded_one(sources, first, expected):
    order = SampleOrder(42, sources)
    assert [values.tolist() for values in sample_at(order, first, first + 8)] == expected


def test_adding_a_source_does_not_reorder_the_others():
    def draws(order: SampleOrder, number: int) -> list[int]:
        source, _, sample = sample_at(order, 0, 4 * BLOCK)
        return sample[source == number][:1500].tolist()

    alone, more = SampleOrder(9, MIXTURE), SampleOrder(9, [("new", 2.0, 50), *MIXTURE])
    assert draws(alone, 0) == draws(more, 1) != draws(SampleOrder(10, MIXTURE), 0)
    assert draws(SampleOrder(9, [("a", 1.0, 100)]), 0) != draws(
        SampleOrder(9, [("b", 1.0, 100)]), 0
    )


def test_a_billion_samples_need_no_more_memory_than_a_thousand():
    def peak_bytes(samples: int) -> int:
        tracemalloc.start()
        try:
            order = SampleOrder(0, [("a", 3.0, samples), ("b", 1.0, samples)])
            sample_at(order, samples, samples + 4096)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # so that one-time imports and caches do not count
    few, many = peak_bytes(1000), peak_bytes(10**9)
    assert many < 1.2 * few < 10_000_000


def test_invalid_weights_are_refused():
    assert MixtureQuotas(["a", "b"], [1.0, 0.0]).count_before(3) == [3 * BLOCK, 0]
    for weights in ([0.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]):
        with pytest.raises(DataError, match="weight"):
            MixtureQuotas(["a", "b"], weights)
