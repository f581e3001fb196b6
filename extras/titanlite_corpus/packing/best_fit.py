"""Best-fit-decreasing bin packing of many items whose lengths are bounded.

The packing of "Fewer Truncations Improve Language Modeling" (Ding et al., 2024,
https://arxiv.org/abs/2404.10830): the longest item first, each into the bin with the least space
that suffices. Items of one length are placed together: a bin takes as many of them as it has space
for, then the next. That is what placing one after the other does, because a bin that has just taken
an item has the least space of all, as long as one more fits. A step of the loop fills an array of
bins of equal space, or places the last items of a length. Only the latter adds arrays, two at most:
the number of steps depends on how many different lengths there are, not on the number of items.
"""

from __future__ import annotations

import numpy as np


class _Bins:
    """Bins by the space that is left in them."""

    def __init__(self, capacity: int):
        self.capacity, self.opened = capacity, 0
        self._by_space: dict[int, list[np.ndarray]] = {}
        self._occupied = 0  # bit n: there are bins with space n

    def least_space(self, length: int) -> int:
        """The least space of a bin that suffices for `length`; a new bin, if no other has it."""
        sufficient = self._occupied >> length
        if not sufficient:
            return self.capacity
        return length + (sufficient & -sufficient).bit_length() - 1

    def take(self, space: int, count: int) -> np.ndarray:
        """At most `count` bins with `space` left; with the space of a new bin, that many new ones.

        The bins last put back are taken first.
        """
        if space == self.capacity:
            self.opened += count
            return np.arange(self.opened - count, self.opened)
        bins = self._by_space[space]
        chosen = bins.pop()
        if len(chosen) > count:
            bins.append(chosen[count:])
            return chosen[:count]
        if not bins:
            self._occupied ^= 1 << space
        return chosen

    def put(self, bins: np.ndarray, space: int) -> None:
        """Put back bins that have `space` left now; full ones are not needed again."""
        if len(bins) and space:
            self._by_space.setdefault(space, []).append(bins)
            self._occupied |= 1 << space


def pack_best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """(bin of each item (int64 [N]), number of bins) for `lengths` [N], each in [1, capacity].

    Items of equal length are placed in their order. Needs 8 bytes an item for the result and about
    40 while it runs.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths {lengths.min()}…{lengths.max()}: must be in 1…{capacity}")
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    counts = np.bincount(lengths, minlength=1)
    placed, done, bins = np.empty(len(lengths), dtype=np.int64), 0, _Bins(capacity)
    for length in np.flatnonzero(counts)[::-1].tolist():
        end = done + int(counts[length])
        while done < end:
            space = bins.least_space(length)
            each = space // length  # items that one of these bins takes
            chosen = bins.take(space, -(-(end - done) // each))
            taken = min(end - done, len(chosen) * each)
            placed[done : done + taken] = np.repeat(chosen, each)[:taken]
            full, rest = divmod(taken, each)
            bins.put(chosen[:full], space - each * length)
            bins.put(chosen[full:], space - rest * length)
            done += taken
    result = np.empty_like(placed)
    result[order] = placed
    return result, bins.opened
