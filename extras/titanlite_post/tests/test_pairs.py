"""Pairs of answers: which document of a window a label belongs to."""

from __future__ import annotations

import torch

from titanlite.labels import DOCUMENT_END as E
from titanlite.labels import IGNORE_INDEX as I
from titanlite.labels import SAME_DOCUMENT as S
from titanlite_post.pairs import pair_segments


def test_each_label_belongs_to_the_document_that_its_token_is_in():
    labels = torch.tensor(
        [
            [S, 7, 8, E, S, 9, E, 3, E, S, 4, 5],  # two pairs; the last document fills the window
            [S, S, 7, E, S, 7, 8, E, S, S, S, S],  # one pair, then padding
            [S, 7, 8, 9, 1, E, S, 2, 3, 4, 5, E],  # one pair, then one id of padding
            [I] * 12,  # a row that fills a batch
        ]
    )
    expected = [
        [-1, 0, 0, -1, -1, 1, -1, 2, -1, -1, 3, 3],
        [-1, -1, 0, -1, -1, 1, 1, -1, -1, -1, -1, -1],
        [-1, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1],
        [-1] * 12,
    ]
    segments = pair_segments(torch.zeros_like(labels), labels)
    assert segments.dtype == torch.int64 and segments.tolist() == expected
