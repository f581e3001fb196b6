"""The mixture: position -> (source, how often it was drawn before), with exact quotas.

A run is divided into segments. In one segment the weights are constant; a new one begins where a
phase changes them, or where a source reaches its limit. A gradual change is RAMP_STEPS segments;
each makes up for the rounding of those before. How often each source was drawn before a segment is
known exactly, so a segment continues where the one before it stopped, and every position costs the
same.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Generator, Iterator, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from titanlite.data.random_bits import GOLDEN, hash_key, mix
from titanlite.errors import DataError

BLOCK = 4096  # positions whose sources are assigned together
RAMP_STEPS = 64  # equal steps of a gradual change of weights

_DIGITS = 12  # of a weight that is computed by `temper`


class MixtureQuotas:
    """How many positions each source of a mixture has, by the weights, in exact arithmetic."""

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
        by_weight = sorted(range(len(exact)), key=lambda i: (exact[i], i))
        remaining = total
        self._fractions: list[tuple[int, int, int]] = []
        # (source, numerator, denominator): fraction of the positions that earlier sources leave
        for number in by_weight:
            fraction = exact[number] / remaining
            self._fractions.append((number, fraction.numerator, fraction.denominator))
            remaining -= exact[number]

    def count_before(self, block: int) -> list[int]:
        """How many positions of the segment before a block each source has: block * BLOCK in all.

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


class Phase(NamedTuple):
    """From position `start` on, the sources have these weights."""

    start: int
    weights: Sequence[float]
    ramp: int = 0  # positions from `start` on in which the shares change linearly to the weights


class MixtureSegment:
    """Positions from `start` on, as long as the weights are constant."""

    def __init__(
        self,
        seed: int,
        names: Sequence[str],
        start: int,
        weights: Sequence[float],
        drawn: list[int],
        target: Sequence[float] | None,
    ):
        """`drawn`: how often each source was drawn before `start`.

        `target`: in a step of a gradual change, the weights that it leads to.
        """
        self.start, self.weights, self.drawn = start, list(weights), drawn
        self.target = target
        self.quotas = MixtureQuotas(names, weights)
        self._key = hash_key(f"{seed} blocks" + (f" from {start}" if start else ""))
        self._count_before = lru_cache(64)(self.quotas.count_before)

    def source_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many earlier positions of the run have it."""
        source, draw = np.zeros_like(positions), positions.copy()
        if len(self.weights) == 1:
            return source, draw
        block, offset = np.divmod(positions - self.start, BLOCK)
        for number in np.unique(block).tolist():
            inside = block == number
            source[inside], draw[inside] = self._source_in_block(number, offset[inside])
        if self.start:
            draw += np.array(self.drawn)[source]
        return source, draw

    def drawn_at(self, position: int) -> list[int]:
        """How often each source was drawn before a position of the segment."""
        block, offset = divmod(position - self.start, BLOCK)
        counts = np.array(self._count_before(block), dtype=object) + self.drawn
        if offset:
            source, _ = self._source_in_block(block, np.arange(offset))
            counts = counts + np.bincount(source, minlength=len(self.weights))
        return [int(count) for count in counts]

    def position_after(self, source: int, draws: int) -> int | None:
        """First position at which a source was drawn `draws` times; None: no run is that long."""
        needed = draws - self.drawn[source]
        blocks = 1
        while self.quotas.count_before(blocks)[source] < needed:
            blocks *= 2
            if blocks * BLOCK > 1 << 60:
                return None
        # the first block at whose end the source was drawn often enough
        block = bisect_left(
            range(blocks), needed, key=lambda b: self.quotas.count_before(b + 1)[source]
        )
        in_block = needed - self._count_before(block)[source]
        sources, _ = self._source_in_block(block, np.arange(BLOCK))
        return self.start + block * BLOCK + int(np.flatnonzero(sources == source)[in_block - 1]) + 1

    def _source_in_block(self, block: int, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`source_at` for offsets [N] inside one block, counted from the start of the segment.

        One source after the other is assigned to evenly spaced offsets among those that are still
        free. So one division gives the number of earlier draws (shuffling a block would need a
        table), and each range of positions, such as a batch, has nearly its quota of each source.
        """
        drawn, after = self._count_before(block), self._count_before(block + 1)
        key = mix(self._key + np.array([block], dtype=np.uint64) * GOLDEN)
        source, draw = np.zeros_like(offset), np.zeros_like(offset)
        unassigned, free = np.ones(offset.shape, dtype=bool), BLOCK
        for number, first in enumerate(drawn):
            quota = after[number] - first
            if quota == 0:
                continue
            shift = (mix(key + np.uint64(number)) % np.uint64(free)).astype(np.int64)
            before = (offset * quota + shift) // free
            chosen = unassigned & ((offset * quota + shift + quota) // free > before)
            source[chosen] = number
            draw[chosen] = first + before[chosen]
            unassigned &= ~chosen
            offset, free = offset - before, free - quota  # numbered among the offsets still free
        return source, draw


class _Ramp(NamedTuple):
    """A gradual change, while its segments are made."""

    target: Sequence[float]  # the weights after it
    owed: list[Fraction]  # by how many samples each source is behind its shares


class Mixture:
    """Which source is drawn at each position of a run."""

    def __init__(
        self, seed: int, names: Sequence[str], phases: Sequence[Phase], limits: Sequence[int | None]
    ):
        """`phases` begin at position 0 and at increasing positions; `limits`: most draws of each
        source. When a source has reached its limit, the others share its weight in proportion to
        theirs. Raises DataError for invalid weights."""
        self._seed, self._names, self._limits = seed, names, limits
        self.end: int | None = None  # the first position without a sample; None: there is none
        self.segments = list(self._divide(phases))
        self._starts = np.array([segment.start for segment in self.segments])

    def _divide(self, phases: Sequence[Phase]) -> Iterator[MixtureSegment]:
        """The segments of the run in order; sets `end` if a phase has no source left."""
        drawn = [0] * len(self._names)
        for number, phase in enumerate(phases):
            MixtureQuotas(self._names, phase.weights)  # checked, even if the run never uses them
            start, ramp = phase.start, _Ramp(phase.weights, [Fraction(0)] * len(self._names))
            steps = _ramp_steps(phases[number - 1].weights, phase) if phase.ramp else ()
            for step_end, weights in steps:
                drawn = yield from self._fill(start, step_end, weights, drawn, ramp)
                start = step_end
            phase_end = phases[number + 1].start if number + 1 < len(phases) else None
            drawn = yield from self._fill(start, phase_end, phase.weights, drawn)

    def _fill(
        self,
        start: int,
        end: int | None,
        weights: Sequence[float | Fraction],
        drawn: list[int],
        ramp: _Ramp | None = None,
    ) -> Generator[MixtureSegment, None, list[int]]:
        """Segments from `start` to `end`; returns the draws of each source; updates `ramp`."""
        while start != end and self.end is None:
            active = [
                Fraction(0) if limit is not None and count >= limit else Fraction(weight)
                for weight, limit, count in zip(weights, self._limits, drawn, strict=True)
            ]
            if not (total := sum(active)):
                self.end = start
                break
            shares = [weight / total for weight in active]
            segment_weights = [float(weight) for weight in active]
            if ramp is not None and end is not None:
                segment_weights = _repay(shares, end - start, ramp.owed)
            segment = MixtureSegment(
                self._seed, self._names, start, segment_weights, drawn, ramp and ramp.target
            )
            yield segment
            ends = [end]
            for source, limit in enumerate(self._limits):
                if limit is not None and segment_weights[source]:
                    ends.append(segment.position_after(source, limit))
            if (stop := min((at for at in ends if at is not None), default=None)) is None:
                break
            before, drawn = drawn, segment.drawn_at(stop)
            if ramp is not None:
                for source, share in enumerate(shares):
                    ramp.owed[source] += (stop - start) * share - (drawn[source] - before[source])
            start = stop
        return drawn

    def source_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and its earlier draws; raises DataError past the end."""
        if self.end is not None and positions.size and int(positions.max()) >= self.end:
            raise DataError(
                f"the data end after {self.end} samples: all sources of a phase have been read"
                " max_epochs times.",
                fix="Use a smaller training.steps, or a larger max_epochs in data.sources.",
            )
        if len(self.segments) == 1:
            return self.segments[0].source_at(positions)
        source, draw = np.empty_like(positions), np.empty_like(positions)
        numbers = self._starts.searchsorted(positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            inside = numbers == number
            source[inside], draw[inside] = self.segments[number].source_at(positions[inside])
        return source, draw

    def drawn_at(self, position: int) -> list[int]:
        """How often each source was drawn before a position, which must not be after `end`."""
        number = int(self._starts.searchsorted(position, side="right")) - 1
        return self.segments[number].drawn_at(position)


def _ramp_steps(before: Sequence[float], phase: Phase) -> Iterator[tuple[int, Sequence[Fraction]]]:
    """(end, shares) of the steps in which the weights `before` change to those of the phase.

    A step has the shares of its middle, so that its total is that of the linear change.
    """
    old, new = (
        [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
        for weights in (before, phase.weights)
    )
    steps = min(RAMP_STEPS, phase.ramp)
    for step in range(steps):
        done = Fraction(2 * step + 1, 2 * steps)
        shares = [a + (b - a) * done for a, b in zip(old, new, strict=True)]
        yield phase.start + phase.ramp * (step + 1) // steps, shares


def _repay(shares: Sequence[Fraction], positions: int, owed: Sequence[Fraction]) -> list[float]:
    """Weights that give each source its share of some positions and what it is owed."""
    wanted = [
        max(Fraction(0), positions * share + rest) if share else Fraction(0)
        for share, rest in zip(shares, owed, strict=True)
    ]
    return [float(value) for value in (wanted if any(wanted) else shares)]


def temper(weights: Sequence[float], sizes: Sequence[int], temperature: float) -> list[float]:
    """Weights that are multiplied by size^(1/temperature), rounded to 12 digits.

    At 1 they are multiplied by the size; the larger the temperature, the less the sizes count. In
    decimal arithmetic, because floating-point powers differ between machines in their last digit.
    """
    context = Context(prec=40)
    exponent = context.divide(Decimal(1), Decimal(temperature))
    powers = [context.power(Decimal(size), exponent) for size in sizes]
    return [
        float(Context(prec=_DIGITS).multiply(Decimal(weight), power))
        for weight, power in zip(weights, powers, strict=True)
    ]
