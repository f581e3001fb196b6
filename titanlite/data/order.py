"""The order of samples: position -> (source, epoch, sample), as pure functions.

There is no table of all samples and no random state that advances. So every position costs the
same, with a thousand samples or a billion, and a checkpoint needs to store the position only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import xxhash

from titanlite.data.windows import PositionWindow, next_start
from titanlite.errors import DataError

BLOCK = 4096  # positions whose sources are assigned together
EXACT_BELOW = 4096
# Sources with fewer samples are shuffled by sorting random keys, others by a Feistel network, which
# needs no table. The network gives about 1/sqrt(samples) more pairs of adjacent samples than a
# uniform permutation (which has one on average): 9 % at 100 samples, 3 % at 1,000, less than 2 %
# from 4,096 on.

_ROUNDS = 6  # with 2, adjacent samples are correlated; with 4, they are not; 2 more are margin
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: its multiples are evenly spaced
_STEPS = np.arange(_ROUNDS, dtype=np.uint64) * _GOLDEN
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MAX_TABLE_ENTRIES = 1 << 18  # of a table of permutations: 2 MiB


class SampleOrder:
    """Which sample of which source is read at each position of a run."""

    def __init__(self, seed: int, sources: Sequence[tuple[str, float, int]]):
        """`sources`: (name, weight, number of samples); raises DataError for invalid weights."""
        names = [name for name, _, _ in sources]
        self.quotas = MixtureQuotas(names, [weight for _, weight, _ in sources])
        self.samples = [samples for _, _, samples in sources]
        self._block_key = _hash_key(f"{seed} blocks")
        self._keys = [_hash_key(f"{seed} source {name}") for name in names]
        self._permutations = lru_cache(2 * len(names))(self._sort_permutations)
        self._drawn_before = lru_cache(64)(self.quotas.drawn_before)

    def version(self, number: int) -> int:
        """1 if the samples of a source have the same positions as in titanlite 0.1, else 2.

        Version 1 rounded the quota of a block to whole samples; version 2 carries the fractional
        rest over to the next block. Version 2 also shuffles sources of fewer than EXACT_BELOW
        samples uniformly.
        """
        unchanged = self.quotas.same_in_every_block and self.samples[number] >= EXACT_BELOW
        return 1 if unchanged or self.samples[number] == 1 else 2

    def sample_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, sample) of each position [N]: int64 [N] each."""
        positions = np.asarray(positions, dtype=np.int64)
        source, draw = self._source_at(positions)
        epoch, sample = np.empty_like(draw), np.empty_like(draw)
        for number, (samples, key) in enumerate(zip(self.samples, self._keys, strict=True)):
            chosen = source == number if len(self.samples) > 1 else slice(None)
            epoch[chosen], nth = np.divmod(draw[chosen], samples)
            if samples < EXACT_BELOW:
                sample[chosen] = self._shuffle_small(number, epoch[chosen], nth)
            else:
                keys = mix(key + epoch[chosen].astype(np.uint64) * _GOLDEN)
                sample[chosen] = permute(nth, samples, keys)
        return source, epoch, sample

    def _shuffle_small(self, number: int, epoch: np.ndarray, nth: np.ndarray) -> np.ndarray:
        """The `nth` sample of each epoch of a small source: int64 [N]."""
        epochs, row = np.unique(epoch, return_inverse=True)
        sample, table_rows = np.empty_like(nth), max(1, _MAX_TABLE_ENTRIES // self.samples[number])
        for first in range(0, len(epochs), table_rows):
            inside = (row >= first) & (row < first + table_rows)
            table = self._permutations(number, epochs[first : first + table_rows].tobytes())
            sample[inside] = table[row[inside] - first, nth[inside]]
        return sample

    def _sort_permutations(self, number: int, epochs: bytes) -> np.ndarray:
        """The permutations of a small source in the given epochs (int64): [epochs, samples].

        Sorting by independent random keys gives every permutation with the same probability. The
        sort is stable, so the order of equal keys does not depend on the version of numpy.
        """
        keys = mix(self._keys[number] + np.frombuffer(epochs, np.int64).astype(np.uint64) * _GOLDEN)
        counters = np.arange(1, self.samples[number] + 1, dtype=np.uint64) * _GOLDEN
        return np.argsort(mix(keys[:, None] + counters), axis=1, kind="stable")

    def _source_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many earlier positions have that source."""
        source, draw = np.zeros_like(positions), positions.copy()
        if len(self.samples) == 1:
            return source, draw
        block, offset = np.divmod(positions, BLOCK)
        for number in np.unique(block).tolist():
            inside = block == number
            source[inside], draw[inside] = self._source_in_block(number, offset[inside])
        return source, draw

    def _source_in_block(self, block: int, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`_source_at` for offsets [N] inside one block.

        One source after the other is assigned to evenly spaced offsets among those that are still
        free. So one division gives the number of earlier draws (shuffling a block would need a
        table), and each range of positions, such as a batch, has nearly its quota of each source.
        """
        drawn, after = self._drawn_before(block), self._drawn_before(block + 1)
        key = mix(self._block_key + np.array([block], dtype=np.uint64) * _GOLDEN)
        source, draw = np.zeros_like(offset), np.zeros_like(offset)
        unassigned, free = np.ones(offset.shape, dtype=bool), BLOCK
        for number, first in enumerate(drawn):
            quota = after[number] - first
            if quota == 0:
                continue
            phase = (mix(key + np.uint64(number)) % np.uint64(free)).astype(np.int64)
            before = (offset * quota + phase) // free
            chosen = unassigned & ((offset * quota + phase + quota) // free > before)
            source[chosen] = number
            draw[chosen] = first + before[chosen]
            unassigned &= ~chosen
            offset, free = offset - before, free - quota  # numbered among the offsets still free
        return source, draw


class MixtureQuotas:
    """How many positions each source of a mixture has, as exact fractions of its weights."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        """Raises DataError if a weight is not a number of at least 0, or if all are 0."""
        for name, weight in zip(names, weights, strict=True):
            if not (math.isfinite(weight) and weight >= 0):
                raise DataError(
                    f'source "{name}": weight = {weight}: must be a number of at least 0.'
                )
        exact = [Fraction(weight) for weight in weights]  # no rounding that depends on the machine
        total = sum(exact)
        if total == 0:
            raise DataError("every source has weight 0.", fix="Give one of them a weight above 0.")
        self.same_in_every_block = all(weight * BLOCK % total == 0 for weight in exact)
        by_weight = sorted(range(len(exact)), key=lambda i: (exact[i], i))
        remaining = total
        self._fractions: list[tuple[int, int, int]] = []
        # (source, numerator, denominator): fraction of the positions that earlier sources leave
        for number in by_weight:
            fraction = exact[number] / remaining if remaining else Fraction(0)
            self._fractions.append((number, fraction.numerator, fraction.denominator))
            remaining -= exact[number]

    def drawn_before(self, block: int) -> list[int]:
        """How many positions before a block each source has; their sum is block * BLOCK.

        One source after the other, the smallest weight first, takes its rounded fraction of the
        remaining positions. So no count ever decreases from block to block, and each stays within
        a few samples of its exact quota during the whole run.
        """
        remaining, counts = block * BLOCK, [0] * len(self._fractions)
        for number, numerator, denominator in self._fractions:
            # rounded to the nearest integer
            counts[number] = (2 * remaining * numerator + denominator) // (2 * denominator)
            remaining -= counts[number]
        return counts


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """The image of each `index` in range(`size`) under the permutation of its key: int64.

    A Feistel network on the pairs (left, right) of a rectangle with at least `size` cells.
    An image outside the range is mapped again until it is inside (cycle walking), which keeps the
    mapping a permutation.
    """
    rows = math.isqrt(max(size - 1, 0)) + 1  # smallest integer whose square is at least `size`
    sides = np.uint64(rows), np.uint64(-(-size // rows))
    index, keys = np.asarray(index).astype(np.uint64), np.asarray(keys, dtype=np.uint64)
    out = _apply_feistel(index, sides, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _apply_feistel(out[outside], sides, keys[outside])
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _apply_feistel(x: np.ndarray, sides: tuple[np.uint64, np.uint64], keys: np.ndarray):
    rows, columns = sides
    left, right = np.divmod(x, columns)
    for number in range(0, _ROUNDS, 2):
        left = (left + mix(keys + right + _STEPS[number]) % rows) % rows
        right = (right + mix(keys + left + _STEPS[number + 1]) % columns) % columns
    return left * columns + right


def mix(x: np.ndarray) -> np.ndarray:
    """64 pseudo-random bits for each uint64: SplitMix64's finaliser (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def _hash_key(text: str) -> np.ndarray:
    key = xxhash.xxh3_64_intdigest(text.encode())
    return np.array([key], dtype=np.uint64)  # a scalar would warn when it overflows


def rank_slices(
    position: int,
    batches: Iterable[int],
    rank: int,
    ranks: int,
    windows: Sequence[PositionWindow] = (),
) -> Iterator[tuple[int, int]]:
    """(first position, sequences) that one of `ranks` ranks reads of each global batch.

    `batches`: sizes of consecutive global batches, of which the first begins at `position`, unless
    `windows` skip it. The ranks read consecutive slices, so a global batch has the same samples for
    any `ranks`.
    """
    for global_batch in batches:
        sequences = global_batch // ranks
        position = next_start(position, global_batch, windows)
        yield position + rank * sequences, sequences
        position += global_batch
