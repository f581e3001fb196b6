"""Position -> (source, epoch, sample): the order of a run as arithmetic.

Nothing is stored and nothing is drawn, so any position costs the same, for a thousand samples or
a billion, and a run that stops needs to keep nothing but how far it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
import xxhash

from titanlite.errors import DataError

BLOCK = 4096  # positions that are dealt out to the sources together
EXACT_BELOW = 4096
# Samples of a source from which on its order is a Feistel network instead of a sort by random keys.
# The network has about 1/sqrt(samples) more pairs of neighbours than a uniform permutation (one a
# permutation is expected): 9 % at 100 samples, 3 % at 1,000, less than 2 % from here on.

_ROUNDS = 6  # two leave neighbours correlated, four do not; the rest is margin
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: spreads counters evenly
_STEPS = np.arange(_ROUNDS, dtype=np.uint64) * _GOLDEN
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_TABLE = 1 << 18  # entries of a table of permutations: 2 MiB


class SampleOrder:
    """Which sample of which source stands at each position of a run."""

    def __init__(self, seed: int, sources: Sequence[tuple[str, float, int]]):
        """`sources` are (name, weight, samples); raises DataError for a mixture that cannot be."""
        names = [name for name, _, _ in sources]
        self.shares = MixtureQuotas(names, [weight for _, weight, _ in sources])
        self.samples = [samples for _, _, samples in sources]
        self._block_key = _key(f"{seed} blocks")
        self._keys = [_key(f"{seed} source {name}") for name in names]
        self._permutations = lru_cache(2 * len(names))(self._sort_permutations)
        self._drawn_before = lru_cache(64)(self.shares.drawn_before)

    def version(self, number: int) -> int:
        """1 where the samples of a source stand where titanlite 0.1 had them, else 2.

        Version 2 carries what is left of a share over to the next block, where version 1 rounded
        it to a whole 4096th, and shuffles sources of fewer than EXACT_BELOW samples exactly.
        """
        same = self.shares.whole and self.samples[number] >= EXACT_BELOW
        return 1 if same or self.samples[number] == 1 else 2

    def sample_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, sample) of each position [N]: int64 [N] each."""
        positions = np.asarray(positions, dtype=np.int64)
        source, draw = self._draw_at(positions)
        epoch, sample = np.empty_like(draw), np.empty_like(draw)
        for number, (samples, key) in enumerate(zip(self.samples, self._keys)):
            mine = source == number if len(self.samples) > 1 else slice(None)
            epoch[mine], nth = np.divmod(draw[mine], samples)
            if samples < EXACT_BELOW:
                sample[mine] = self._shuffle_exactly(number, epoch[mine], nth)
            else:
                keys = mix(key + epoch[mine].astype(np.uint64) * _GOLDEN)
                sample[mine] = permute(nth, samples, keys)
        return source, epoch, sample

    def _shuffle_exactly(self, number: int, epoch: np.ndarray, nth: np.ndarray) -> np.ndarray:
        """The `nth` sample of each epoch of a small source: int64 [N] each."""
        epochs, row = np.unique(epoch, return_inverse=True)
        sample, at_once = np.empty_like(nth), max(1, _TABLE // self.samples[number])
        for first in range(0, len(epochs), at_once):
            mine = (row >= first) & (row < first + at_once)
            table = self._permutations(number, epochs[first : first + at_once].tobytes())
            sample[mine] = table[row[mine] - first, nth[mine]]
        return sample

    def _sort_permutations(self, number: int, epochs: bytes) -> np.ndarray:
        """The permutations of a small source in some epochs (int64): [epochs, samples].

        Samples sorted by independent random keys are uniformly distributed over all permutations.
        The sort is stable, so equal keys cannot make the order depend on the version of numpy.
        """
        keys = mix(self._keys[number] + np.frombuffer(epochs, np.int64).astype(np.uint64) * _GOLDEN)
        counters = np.arange(1, self.samples[number] + 1, dtype=np.uint64) * _GOLDEN
        return np.argsort(mix(keys[:, None] + counters), axis=1, kind="stable")

    def _draw_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how often that source was drawn before it."""
        source, draw = np.zeros_like(positions), positions.copy()
        if len(self.samples) == 1:
            return source, draw
        block, place = np.divmod(positions, BLOCK)
        for number in np.unique(block).tolist():
            mine = block == number
            source[mine], draw[mine] = self._deal_block(number, place[mine])
        return source, draw

    def _deal_block(self, block: int, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source and its draw at some places of one block.

        Sources are dealt out one by one, each spread evenly over the places that the ones before
        it left. Counting is then a division, where a shuffled block would have to be built; and
        every stretch of positions, so every batch, has nearly its share of each source.
        """
        drawn, after = self._drawn_before(block), self._drawn_before(block + 1)
        key = mix(self._block_key + np.array([block], dtype=np.uint64) * _GOLDEN)
        source, draw = np.zeros_like(place), np.zeros_like(place)
        undecided, free = np.ones(place.shape, dtype=bool), BLOCK
        for number, (first, quota) in enumerate(zip(drawn, np.subtract(after, drawn).tolist())):
            if quota == 0:
                continue
            turn = (mix(key + np.uint64(number)) % np.uint64(free)).astype(np.int64)
            before = (place * quota + turn) // free
            mine = undecided & ((place * quota + turn + quota) // free > before)
            source[mine] = number
            draw[mine] = first + before[mine]
            undecided &= ~mine
            place, free = place - before, free - quota
        return source, draw


class MixtureQuotas:
    """How often each source of a mixture is drawn, as exact fractions of its weights."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]):
        """Raises DataError where a weight is not a number of at least 0, or all are 0."""
        for name, weight in zip(names, weights):
            if not (math.isfinite(weight) and weight >= 0):
                raise DataError(
                    f'source "{name}": weight = {weight}: must be a number of at least 0.'
                )
        exact = [Fraction(weight) for weight in weights]  # so that no machine rounds otherwise
        total = sum(exact)
        if total == 0:
            raise DataError("every source has weight 0.", fix="Give one of them a weight above 0.")
        self.whole = all(weight * BLOCK % total == 0 for weight in exact)  # every block is the same
        by_weight = sorted(range(len(exact)), key=lambda i: (exact[i], i))
        left = total
        self._of_rest: list[tuple[int, int, int]] = []  # source, its part of what is left: n / d
        for number in by_weight:
            part = exact[number] / left if left else Fraction(0)
            self._of_rest.append((number, part.numerator, part.denominator))
            left -= exact[number]

    def drawn_before(self, block: int) -> list[int]:
        """How many of the positions before a block each source has; the sum is block * BLOCK.

        Each source in turn, the smallest weight first, takes its rounded share of what is left.
        So no count ever decreases from block to block, and each stays within a few samples of
        its exact share for the whole run.
        """
        left, counts = block * BLOCK, [0] * len(self._of_rest)
        for number, share, of in self._of_rest:
            counts[number] = (2 * left * share + of) // (2 * of)  # rounded to the nearest integer
            left -= counts[number]
        return counts


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Where each `index` of range(`size`) goes under its key: int64; one key, one permutation.

    A Feistel network on pairs (left, right) of a rectangle just larger than `size`; what lands
    outside walks on until it is inside, which keeps it a permutation.
    """
    rows = math.isqrt(max(size - 1, 0)) + 1  # the smallest whose square is at least `size`
    sides = np.uint64(rows), np.uint64(-(-size // rows))
    index, keys = np.asarray(index).astype(np.uint64), np.asarray(keys, dtype=np.uint64)
    out = _scramble(index, sides, keys)
    outside = np.flatnonzero(out >= size)
    while outside.size:
        out[outside] = _scramble(out[outside], sides, keys[outside])
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _scramble(x: np.ndarray, sides: tuple[np.uint64, np.uint64], keys: np.ndarray) -> np.ndarray:
    rows, columns = sides
    left, right = np.divmod(x, columns)
    for number in range(0, _ROUNDS, 2):
        left = (left + mix(keys + right + _STEPS[number]) % rows) % rows
        right = (right + mix(keys + left + _STEPS[number + 1]) % columns) % columns
    return left * columns + right


def mix(x: np.ndarray) -> np.ndarray:
    """64 bits that look random, of each uint64: SplitMix64's finaliser (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def _key(text: str) -> np.ndarray:
    key = xxhash.xxh3_64_intdigest(text.encode())
    return np.array([key], dtype=np.uint64)  # an array, because it wraps silently


def rank_slices(
    position: int, global_batch: int, rank: int, ranks: int
) -> Iterator[tuple[int, int]]:
    """(position, rows) that one of `ranks` ranks reads of each global batch, from `position` on.

    The ranks' rows are the global batch cut in pieces, so its samples are the same for any ranks.
    """
    rows = global_batch // ranks
    while True:
        yield position + rank * rows, rows
        position += global_batch
