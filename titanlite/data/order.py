"""The order of samples: position -> (source, epoch, sample), as pure functions.

There is no table of all samples and no random state that advances. So every position costs the
same, with a thousand samples or a billion, and a checkpoint needs to store the position only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from titanlite.data.mixture import Mixture, Phase
from titanlite.data.random_bits import GOLDEN, hash_key, mix

# Sources with fewer samples are shuffled by sorting random keys, others by a Feistel network, which
# needs no table. The network gives about 1/sqrt(samples) more pairs of adjacent samples than a
# uniform permutation (which has one on average): 9 % at 100 samples, 3 % at 1,000, less than 2 %
# from 4,096 on.
SORT_BELOW = 4096

_ROUNDS = 6  # with 2, adjacent samples are correlated; with 4, they are not; 2 more are margin
_STEPS = np.arange(_ROUNDS, dtype=np.uint64) * GOLDEN
_MAX_TABLE_ENTRIES = 1 << 18  # of a table of permutations: 2 MiB


class SourceOrder(NamedTuple):
    """What the order needs to know about a source."""

    name: str
    weight: float
    samples: int | None  # of an epoch; None: unknown, so epoch 0 never ends and is not shuffled
    limit: int | None = None  # most samples that a run reads of it
    shuffled: bool = True  # False: every epoch in the order of the files


class SampleOrder:
    """Which sample of which source is read at each position of a run."""

    def __init__(
        self,
        seed: int,
        sources: Sequence[tuple[str, float, int] | SourceOrder],
        phases: Sequence[Phase] = (),
    ):
        """`phases`: later weights of the sources. Raises DataError for invalid weights."""
        self._sources = [SourceOrder(*source) for source in sources]
        names = [source.name for source in self._sources]
        first = Phase(0, [source.weight for source in self._sources])
        limits = [source.limit for source in self._sources]
        self.mixture = Mixture(seed, names, [first, *phases], limits)
        self._keys = [hash_key(f"{seed} source {name}") for name in names]
        self._permutations = lru_cache(2 * len(names))(self._sort_permutations)

    def sample_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, sample) of each position [N]: int64 [N] each."""
        positions = np.asarray(positions, dtype=np.int64)
        source, draw = self.mixture.source_at(positions)
        epoch, sample = np.empty_like(draw), np.empty_like(draw)
        for number, entry in enumerate(self._sources):
            samples = entry.samples
            chosen = source == number if len(self._sources) > 1 else slice(None)
            if samples is None:
                epoch[chosen], sample[chosen] = 0, draw[chosen]
                continue
            epoch[chosen], nth = np.divmod(draw[chosen], samples)
            if not entry.shuffled:
                sample[chosen] = nth
            elif samples < SORT_BELOW:
                sample[chosen] = self._shuffle_small(number, samples, epoch[chosen], nth)
            else:
                keys = mix(self._keys[number] + epoch[chosen].astype(np.uint64) * GOLDEN)
                sample[chosen] = permute(nth, samples, keys)
        return source, epoch, sample

    def _shuffle_small(
        self, number: int, samples: int, epoch: np.ndarray, nth: np.ndarray
    ) -> np.ndarray:
        """The `nth` sample of each epoch of a small source: int64 [N]."""
        epochs, row = np.unique(epoch, return_inverse=True)
        sample, table_rows = np.empty_like(nth), max(1, _MAX_TABLE_ENTRIES // samples)
        for first in range(0, len(epochs), table_rows):
            inside = (row >= first) & (row < first + table_rows)
            table = self._permutations(
                number, samples, epochs[first : first + table_rows].tobytes()
            )
            sample[inside] = table[row[inside] - first, nth[inside]]
        return sample

    def _sort_permutations(self, number: int, samples: int, epochs: bytes) -> np.ndarray:
        """The permutations of a small source in the given epochs (int64): [epochs, samples].

        Sorting by independent random keys gives every permutation with the same probability. The
        sort is stable, so the order of equal keys does not depend on the version of numpy.
        """
        keys = mix(self._keys[number] + np.frombuffer(epochs, np.int64).astype(np.uint64) * GOLDEN)
        counters = np.arange(1, samples + 1, dtype=np.uint64) * GOLDEN
        return np.argsort(mix(keys[:, None] + counters), axis=1, kind="stable")


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """The image of each `index` in range(`size`) under the permutation of its key: int64.

    A Feistel network on the pairs (left, right) of a rectangle with at least `size` cells.
    An image outside the range is mapped again until it is inside (cycle walking), which keeps the
    mapping a permutation.
    """
    rows = math.isqrt(size - 1) + 1  # smallest integer whose square is at least `size`
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


@dataclass(frozen=True)
class PositionWindow:
    """Positions [start, end) around a roll-back's cause: skipped, or at a lower learning rate."""

    start: int
    end: int
    lr_factor: float = 0.0  # of the learning rate of steps in the window; 0: they are skipped

    def overlaps(self, position: int, samples: int) -> bool:
        """Whether a step that consumes `samples` from `position` on reaches into the window."""
        return self.start < position + samples and position < self.end


def next_start(position: int, samples: int, windows: Iterable[PositionWindow]) -> int:
    """First position of the next step, which consumes `samples`, of a run at `position`.

    A step that would reach into a skipped window starts at the end of the window instead.
    """
    skipped = [window for window in windows if window.lr_factor == 0]
    while ends := [w.end for w in skipped if w.overlaps(position, samples)]:
        position = max(ends)
    return position


def window_lr_factor(position: int, samples: int, windows: Iterable[PositionWindow]) -> float:
    """Factor of the learning rate for a step that consumes `samples` from `position` on."""
    factors = [w.lr_factor for w in windows if w.lr_factor and w.overlaps(position, samples)]
    return min(factors, default=1.0)


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
    any `ranks`; if it has no equal slices, the first ranks have one sequence more.
    """
    for global_batch in batches:
        sequences, more = divmod(global_batch, ranks)
        position = next_start(position, global_batch, windows)
        yield position + rank * sequences + min(rank, more), sequences + (rank < more)
        position += global_batch
