"""Best fit: the bins of placing one item after the other, in the time of a vectorised loop."""

from __future__ import annotations

import numpy as np
import pytest

from titanlite_corpus.packing.best_fit import pack_best_fit


def place_one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """The space left in each bin after best fit, the longest item first; sorted."""
    spaces: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else capacity) - length)
    return sorted(spaces)


def random_lengths(seed: int, items: int, capacity: int) -> np.ndarray:
    """Many short items, some long, many of equal length."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(capacity / 6), 1.2, items)).astype(np.int64)
    return np.clip(lengths, 1, capacity)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 513])
@pytest.mark.parametrize("items", [0, 1, 3, 700])
def test_the_bins_are_those_of_placing_one_item_after_the_other(capacity, items):
    for seed in range(2):
        lengths = random_lengths(seed, items, capacity)
        bins, count = pack_best_fit(lengths, capacity)
        used = np.bincount(bins, weights=lengths, minlength=count).astype(int)
        assert len(bins) == items and len(used) == count
        assert sorted((capacity - used).tolist()) == place_one_by_one(lengths, capacity)


def test_an_item_that_fits_no_bin_is_refused():
    for lengths in ([0, 3], [4, 9]):
        with pytest.raises(ValueError, match="must be in 1…8"):
            pack_best_fit(np.array(lengths), 8)
