"""A global batch that the ranks cannot divide is completed by idle sequences.

Shapes stay the same: each data-parallel rank computes whole local batches. Idle sequences come
last. They repeat a sequence of the batch, so that they change no maximum that Float8 scales by, and
their labels are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.labels import IGNORE_INDEX


class RankSlice(NamedTuple):
    """Which sequences of a global batch one data-parallel rank has, without idle ones."""

    first: int  # position of the first of them
    sequences: int  # may be 0
    batch: int  # sequences of the global batch

    def part(self, start: int, sequences: int) -> RankSlice:
        """Those among the next `sequences` sequences of the rank from number `start` on."""
        count = max(0, min(self.sequences - start, sequences))
        return self._replace(first=self.first + start, sequences=count)


def rank_rows(batch: int, data_ranks: int, local_batch: int) -> int:
    """Sequences that each data-parallel rank computes of a global batch, with idle ones."""
    return -(-batch // (data_ranks * local_batch)) * local_batch


def read_with_idle(
    read: Callable[[int, int], tuple[Tensor, Tensor]], first: int, sequences: int, rows: int
) -> tuple[Tensor, Tensor]:
    """Inputs and labels [rows, T]: `sequences` from position `first` on, then idle ones.

    A rank without a sequence repeats the one before, which another rank has.
    """
    inputs, labels = read(first, sequences) if sequences else read(first - 1, 1)
    if rows == sequences:
        return inputs, labels
    inputs = inputs[torch.arange(rows).clamp(max=len(inputs) - 1)]
    return inputs, F.pad(labels[:sequences], (0, 0, 0, rows - sequences), value=IGNORE_INDEX)
