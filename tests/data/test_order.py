"""The order of a run: nothing twice, nothing missed, and the same however it is asked for."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from titanlite.data.order import BLOCK, MixtureQuotas, SampleOrder, permute
from titanlite.errors import DataError

MIXTURE = [("code", 0.7, 1000), ("prose", 0.25, 333), ("mathematics", 0.05, 7)]
HALVES = [("code", 0.5, 5000), ("prose", 0.375, 4096), ("mathematics", 0.125, 70_000)]
KNOWN_ORDERS = [  # sources, first position, version of the order, (source, epoch, sample) of 8
    (
        MIXTURE,
        2 * BLOCK - 4,
        2,
        [
            [0, 0, 0, 1, 0, 0, 0, 1],
            [5, 5, 5, 6, 5, 5, 5, 6],
            [887, 320, 511, 59, 794, 348, 638, 129],
        ],
    ),
    (
        HALVES,
        79 * BLOCK - 4,
        1,
        [
            [0, 1, 0, 1, 0, 1, 0, 1],
            [32, 29, 32, 29, 32, 29, 32, 29],
            [2494, 401, 2811, 2137, 4804, 4017, 3528, 3572],
        ],
    ),
    (
        [("code", 3.0, 5000)],
        4996,
        1,
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
def test_no_sample_of_a_corpus_of_any_size_is_lost_or_doubled(size):
    for key in (0, 12_345_678_901_234_567_890):
        keys = np.full(size, key, dtype=np.uint64)
        assert np.array_equal(np.sort(permute(np.arange(size), size, keys)), np.arange(size))


def test_the_order_looks_shuffled():
    size = 1 << 16
    places, index = permute(np.arange(size), size, np.full(size, 3, np.uint64)), np.arange(size)
    noise = 5 / math.sqrt(size)
    assert abs(np.corrcoef(index, places)[0, 1]) < noise
    for step in (1, 2, 256, 257):
        assert abs(np.corrcoef(places[:-step], places[step:])[0, 1]) < noise
    assert abs(np.mean(np.diff(places) > 0) - 0.5) < noise


def test_every_epoch_has_every_sample_once_and_in_another_order():
    for samples in (1, 10, 4096, 5000):
        source, epoch, sample = sample_at(SampleOrder(5, [("a", 1.0, samples)]), 0, 3 * samples)
        assert np.array_equal(epoch, np.repeat([0, 1, 2], samples))
        epochs = sample.reshape(3, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (3, 1)))
        assert samples < 10 or not np.array_equal(epochs[0], epochs[1])


def test_epochs_of_a_mixture_come_one_after_the_other():
    source, epoch, sample = sample_at(SampleOrder(5, MIXTURE), 0, 3 * BLOCK + 100)
    for number, (_, _, samples) in enumerate(MIXTURE):
        mine = source == number
        draws = np.arange(mine.sum())
        assert np.array_equal(epoch[mine], draws // samples)  # in order of position
        whole = len(draws) // samples * samples
        epochs = sample[mine][:whole].reshape(-1, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (len(epochs), 1)))


def test_every_block_has_the_share_that_is_counted_for_it():
    order = SampleOrder(1, MIXTURE)
    for block in (0, 1, 77, 10**9):
        source, _, _ = sample_at(order, block * BLOCK, (block + 1) * BLOCK)
        counts = np.bincount(source, minlength=3)
        first, after = (order.shares.drawn_before(b) for b in (block, block + 1))
        assert counts.tolist() == [b - a for a, b in zip(first, after)]
        assert np.abs(counts - BLOCK * np.array([0.7, 0.25, 0.05])).max() < 2


@pytest.mark.parametrize(
    "weights",
    [
        [0.0004, 0.9996],  # a whole 4096th would be 22 % too much
        [0.0001831, 0.9998169],
        [0.67, 0.15, 0.045, 0.045, 0.045, 0.025, 0.02],
        [1.0, 1e-5, 1e-5, 1e-5, 0.0, 3.0],  # less than one sample in many blocks
        [1 / 3] * 9,
    ],
    ids=str,
)
def test_shares_are_exact_over_a_run_however_small_the_weight(weights):
    shares = MixtureQuotas([str(i) for i in range(len(weights))], weights)
    exact = np.array(weights) / sum(weights)
    before = shares.drawn_before(0)
    for block in [*range(1, 300), 10**6, 10**9, 2**51]:
        drawn = shares.drawn_before(block)
        assert sum(drawn) == block * BLOCK
        assert all(late >= early for late, early in zip(drawn, before))  # nothing is drawn back
        rounding = block * BLOCK * 1e-15  # of this line's own floats
        assert np.abs(np.array(drawn) - block * BLOCK * exact).max() < 2 + rounding
        before = drawn


def test_a_source_of_a_tiny_weight_is_drawn_sample_after_sample():
    order = SampleOrder(3, [("rare", 1e-5, 10), ("common", 1.0, 10**6)])
    source, epoch, sample = sample_at(order, 0, 500 * BLOCK)
    rare = source == 0
    assert abs(rare.sum() - 500 * BLOCK * 1e-5 / (1 + 1e-5)) < 1
    assert epoch[rare].tolist() == [draw // 10 for draw in range(rare.sum())]
    assert len(set(sample[rare][:10].tolist())) == 10


def frequencies(size: int, permutations: int) -> np.ndarray:
    """How often each permutation of a source of `size` samples is an epoch of it."""
    _, _, sample = sample_at(SampleOrder(11, [("a", 1.0, size)]), 0, size * permutations)
    codes = sample.reshape(-1, size) @ (size ** np.arange(size))
    return np.unique(codes, return_counts=True)[1]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_order_of_a_small_source_is_uniform_over_all_permutations(size):
    kinds, permutations = math.factorial(size), 24_000
    found = frequencies(size, permutations)
    expected = permutations / kinds
    assert len(found) == kinds
    chi_squared = ((found - expected) ** 2 / expected).sum()
    assert abs(chi_squared - (kinds - 1)) < 5 * math.sqrt(2 * (kinds - 1))


@pytest.mark.parametrize("size", [16, 100, 1000])
def test_a_small_source_has_no_more_neighbours_than_chance_gives(size):
    epochs = 800_000 // size
    _, _, sample = sample_at(SampleOrder(5, [("a", 1.0, size)]), 0, size * epochs)
    pairs = (np.diff(sample.reshape(epochs, size), axis=1) == 1).sum()
    expected = epochs * (size - 1) / size  # in a random permutation; close to Poisson
    assert abs(pairs - expected) < 4 * math.sqrt(expected)


def test_every_batch_has_nearly_its_share_of_every_source():
    source, _, _ = sample_at(SampleOrder(1, MIXTURE), 0, 8 * BLOCK)
    for number, (_, weight, _) in enumerate(MIXTURE):
        in_batches = (source == number).reshape(-1, 64).sum(1)
        assert np.abs(in_batches - 64 * weight).max() < 4


@pytest.mark.parametrize("seed", range(3))
def test_asking_in_other_slices_gives_the_same_samples(seed):
    order, generator = SampleOrder(seed, MIXTURE), np.random.default_rng(seed)
    start, stop = 10**12, 10**12 + 3 * BLOCK
    whole = np.stack(sample_at(order, start, stop))
    cuts = [start, *np.sort(generator.integers(start, stop, 50)), stop]
    parts = [np.stack(sample_at(order, a, b)) for a, b in zip(cuts, cuts[1:])]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    shuffled = generator.permutation(stop - start)
    assert np.array_equal(np.stack(order.sample_at(start + shuffled)), whole[:, shuffled])


@pytest.mark.parametrize("sources, first, version, expected", KNOWN_ORDERS)
def test_the_order_does_not_change_with_the_version(sources, first, version, expected):
    order = SampleOrder(42, sources)
    assert [found.tolist() for found in sample_at(order, first, first + 8)] == expected
    assert [order.version(number) for number in range(len(sources))] == [version] * len(sources)


def test_another_source_does_not_reorder_the_samples_of_the_others():
    def draws(order: SampleOrder, number: int) -> list[int]:
        source, _, sample = sample_at(order, 0, 4 * BLOCK)
        return sample[source == number][:1500].tolist()

    alone, more = SampleOrder(9, MIXTURE), SampleOrder(9, [("new", 2.0, 50), *MIXTURE])
    assert draws(alone, 0) == draws(more, 1) != draws(SampleOrder(10, MIXTURE), 0)
    assert draws(SampleOrder(9, [("a", 1.0, 100)]), 0) != draws(
        SampleOrder(9, [("b", 1.0, 100)]), 0
    )


def test_a_billion_samples_cost_the_memory_of_a_thousand():
    def peak_bytes(samples: int) -> int:
        tracemalloc.start()
        try:
            order = SampleOrder(0, [("a", 3.0, samples), ("b", 1.0, samples)])
            sample_at(order, samples, samples + 4096)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # what is only imported or cached once
    few, many = peak_bytes(1000), peak_bytes(10**9)
    assert many < 1.2 * few < 10_000_000


def test_weights_that_give_no_share_are_refused():
    assert MixtureQuotas(["a", "b"], [1.0, 0.0]).drawn_before(3) == [3 * BLOCK, 0]
    for weights in ([0.0, 0.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]):
        with pytest.raises(DataError, match="weight"):
            MixtureQuotas(["a", "b"], weights)
