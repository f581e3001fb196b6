"""Pairs of answers in packed windows: documents 2k and 2k + 1 of a window are pair k."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from titanlite.data.packed import open_packed
from titanlite.labels import DOCUMENT_END

# Not a format of the trainer, which would train on chosen and rejected answers alike.
PAIRS, open_pairs = "pairs", partial(open_packed, pairs=True)


def pair_segments(inputs: Tensor, labels: Tensor) -> Tensor:
    """The document that each label belongs to, int64 [B, T], from inputs and labels [B, T].

    Within its row, 2k is the chosen answer of pair k and 2k + 1 the rejected one; -1 where the
    label is ignored, as in padding. The labels alone state where documents end. Does not wait for
    the device.
    """
    ends_before = (labels == DOCUMENT_END).cumsum(dim=1)
    return torch.where(labels >= 0, ends_before, -1)
