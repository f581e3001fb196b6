"""The order of a run: nothing twice, nothing missed, and the same however it is asked for."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from titanlite.data.order import BLOCK, Order, block_quotas, permute
from titanlite.errors import DataError

MIXTURE = [("code", 0.7, 1000), ("prose", 0.25, 333), ("mathematics", 0.05, 7)]
EXPECTED = [
    [0, 0, 0, 1, 0, 0, 0, 1],
    [5, 5, 5, 6, 5, 5, 5, 6],
    [355, 910, 865, 235, 181, 255, 654, 154],
]


def sample_at(order: Order, start: int, stop: int):
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
        source, epoch, sample = sample_at(Order(5, [("a", 1.0, samples)]), 0, 3 * samples)
        assert np.array_equal(epoch, np.repeat([0, 1, 2], samples))
        epochs = sample.reshape(3, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (3, 1)))
        assert samples < 10 or not np.array_equal(epochs[0], epochs[1])


def test_epochs_of_a_mixture_come_one_after_the_other():
    source, epoch, sample = sample_at(Order(5, MIXTURE), 0, 3 * BLOCK + 100)
    for number, (_, _, samples) in enumerate(MIXTURE):
        mine = source == number
        draws = np.arange(mine.sum())
        assert np.array_equal(epoch[mine], draws // samples)  # in order of position
        whole = len(draws) // samples * samples
        epochs = sample[mine][:whole].reshape(-1, samples)
        assert np.array_equal(np.sort(epochs), np.tile(np.arange(samples), (len(epochs), 1)))


def test_every_block_has_the_exact_share_of_every_source():
    weights = [weight for _, weight, _ in MIXTURE]
    quotas = block_quotas([name for name, _, _ in MIXTURE], weights)
    assert sum(quotas) == BLOCK
    assert all(abs(q - w * BLOCK) < 1 for q, w in zip(quotas, weights))
    for block in (0, 1, 77, 10**9):
        source, _, _ = sample_at(Order(1, MIXTURE), block * BLOCK, (block + 1) * BLOCK)
        assert np.bincount(source, minlength=3).tolist() == quotas


def test_every_batch_has_nearly_its_share_of_every_source():
    source, _, _ = sample_at(Order(1, MIXTURE), 0, 8 * BLOCK)
    for number, (_, weight, _) in enumerate(MIXTURE):
        in_batches = (source == number).reshape(-1, 64).sum(1)
        assert np.abs(in_batches - 64 * weight).max() < 4


@pytest.mark.parametrize("seed", range(3))
def test_asking_in_other_slices_gives_the_same_samples(seed):
    order, generator = Order(seed, MIXTURE), np.random.default_rng(seed)
    start, stop = 10**12, 10**12 + 3 * BLOCK
    whole = np.stack(sample_at(order, start, stop))
    cuts = [start, *np.sort(generator.integers(start, stop, 50)), stop]
    parts = [np.stack(sample_at(order, a, b)) for a, b in zip(cuts, cuts[1:])]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    shuffled = generator.permutation(stop - start)
    assert np.array_equal(np.stack(order.sample_at(start + shuffled)), whole[:, shuffled])


def test_the_order_does_not_change_with_the_version():
    source, epoch, sample = sample_at(Order(42, MIXTURE), 2 * BLOCK - 4, 2 * BLOCK + 4)
    assert source.tolist() == EXPECTED[0]
    assert epoch.tolist() == EXPECTED[1]
    assert sample.tolist() == EXPECTED[2]


def test_another_source_does_not_reorder_the_samples_of_the_others():
    def draws(order: Order, number: int) -> list[int]:
        source, _, sample = sample_at(order, 0, 4 * BLOCK)
        return sample[source == number][:1500].tolist()

    alone, more = Order(9, MIXTURE), Order(9, [("new", 2.0, 50), *MIXTURE])
    assert draws(alone, 0) == draws(more, 1) != draws(Order(10, MIXTURE), 0)
    assert draws(Order(9, [("a", 1.0, 100)]), 0) != draws(Order(9, [("b", 1.0, 100)]), 0)


def test_a_billion_samples_cost_the_memory_of_a_thousand():
    def peak_bytes(samples: int) -> int:
        tracemalloc.start()
        try:
            order = Order(0, [("a", 3.0, samples), ("b", 1.0, samples)])
            sample_at(order, samples, samples + 4096)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # what is only imported or cached once
    few, many = peak_bytes(1000), peak_bytes(10**9)
    assert many < 1.2 * few < 10_000_000


def test_a_source_that_would_never_be_drawn_is_refused_with_the_least_weight():
    with pytest.raises(DataError, match='"b".*less than one') as refusal:
        block_quotas(["a", "b"], [1.0, 1e-5])
    least = float(refusal.value.fix.split("at least ")[1].split()[0])
    assert block_quotas(["a", "b"], [1.0, least * 1.0001])[1] == 1
    assert block_quotas(["a", "b"], [1.0, 0.0]) == [BLOCK, 0]
    for weights in ([0.0, 0.0], [1.0, -1.0], [1.0, math.inf]):
        with pytest.raises(DataError, match="weight"):
            block_quotas(["a", "b"], weights)
