"""Position -> (source, epoch, sample): the order of a run as arithmetic.

Nothing is stored and nothing is drawn, so any position costs the same, for a thousand samples or
a billion, and a run that stops needs to keep nothing but how far it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import xxhash

from titanlite.errors import DataError

BLOCK = 4096  # positions in which every source has its exact share

_ROUNDS = 6  # two leave neighbours correlated, four do not; the rest is margin
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: spreads counters evenly
_STEPS = np.arange(_ROUNDS, dtype=np.uint64) * _GOLDEN
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Order:
    """Which sample of which source stands at each position of a run."""

    def __init__(self, seed: int, sources: Sequence[tuple[str, float, int]]):
        """`sources` are (name, weight, samples); raises DataError for a mixture that cannot be."""
        names = [name for name, _, _ in sources]
        self.quotas = block_quotas(names, [weight for _, weight, _ in sources])
        self.samples = [samples for _, _, samples in sources]
        self._block_key = _key(f"{seed} blocks")
        self._keys = [_key(f"{seed} source {name}") for name in names]

    def sample_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, sample) of each position [N]: int64 [N] each."""
        positions = np.asarray(positions, dtype=np.int64)
        source, draw = self._draw_at(positions)
        epoch, sample = np.empty_like(draw), np.empty_like(draw)
        for number, (samples, key) in enumerate(zip(self.samples, self._keys)):
            mine = source == number if len(self.samples) > 1 else slice(None)
            epoch[mine], nth = np.divmod(draw[mine], samples)
            sample[mine] = permute(nth, samples, mix(key + epoch[mine].astype(np.uint64) * _GOLDEN))
        return source, epoch, sample

    def _draw_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how often that source was drawn before it.

        Sources are dealt out one by one, each spread evenly over the places that the ones before
        it left. Counting is then a division, where a shuffled block would have to be built; and
        every stretch of positions, so every batch, has nearly its exact share of each source.
        """
        block, place = np.divmod(positions, BLOCK)
        source, draw = np.zeros_like(positions), positions.copy()
        if len(self.quotas) == 1:
            return source, draw
        key = mix(self._block_key + block.astype(np.uint64) * _GOLDEN)
        free = BLOCK
        undecided = np.ones(positions.shape, dtype=bool)
        for number, quota in enumerate(self.quotas):
            if quota == 0:
                continue
            turn = (mix(key + np.uint64(number)) % np.uint64(free)).astype(np.int64)
            before = (place * quota + turn) // free
            mine = undecided & ((place * quota + turn + quota) // free > before)
            source[mine] = number
            draw[mine] = block[mine] * quota + before[mine]
            undecided &= ~mine
            place, free = place - before, free - quota
        return source, draw


def block_quotas(names: Sequence[str], weights: Sequence[float]) -> list[int]:
    """How many of BLOCK positions each source has: exact shares, largest remainders rounded up.

    Raises DataError where a source that has a weight would never be drawn.
    """
    for name, weight in zip(names, weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(f'source "{name}": weight = {weight}: must be a number of at least 0.')
    exact = [Fraction(weight) for weight in weights]  # so that no machine rounds otherwise
    total = sum(exact)
    if total == 0:
        raise DataError("every source has weight 0.", fix="Give one of them a weight above 0.")
    shares = [weight * BLOCK / total for weight in exact]
    quotas = [math.floor(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: (quotas[i] - shares[i], i))
    for i in by_rest[: BLOCK - sum(quotas)]:
        quotas[i] += 1
    for name, weight, quota in zip(names, weights, quotas):
        if weight > 0 and quota == 0:
            least = float((total - Fraction(weight)) / (BLOCK - 1))
            raise DataError(
                f'source "{name}": weight = {weight:g} is less than one sample in {BLOCK}.',
                fix=f"Give it at least {least:.6g} beside the others, or 0 to leave it out.",
            )
    return quotas


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


def slices_of(
    position: int, global_batch: int, rank: int, ranks: int
) -> Iterator[tuple[int, int]]:
    """(position, rows) that one of `ranks` ranks reads of each global batch, from `position` on.

    The ranks' rows are the global batch cut in pieces, so its samples are the same for any ranks.
    """
    rows = global_batch // ranks
    while True:
        yield position + rank * rows, rows
        position += global_batch
