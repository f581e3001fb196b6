"""A block of documents and what rules measure of it, vectorised over all its documents.

Words, lines and paragraphs are stored as indices of distinct texts. So what a rule asks of a word
or a line is computed once for each distinct one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

BLOCK_BYTES = 2 << 20  # of text; more do not fit into the caches of a core


@dataclass(frozen=True)
class TextParts:
    """Words, lines or paragraphs of the documents of a block. None of them is blank."""

    distinct: Any  # the distinct texts, a pyarrow array
    ids: np.ndarray  # [N] position of each part in `distinct`
    offsets: np.ndarray  # [D + 1] the parts of document d are offsets[d]:offsets[d + 1]

    @cached_property
    def documents(self) -> np.ndarray:
        """[N] the document of each part."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @cached_property
    def counts(self) -> np.ndarray:
        """[D] parts of each document."""
        return np.diff(self.offsets)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[N] characters of each part."""
        return to_numpy(pc.utf8_length(self.distinct)).astype(np.int64)[self.ids]

    @cached_property
    def repeated(self) -> np.ndarray:
        """[N] whether a part with the same text is before it in the same document."""
        codes = number_distinct(self.documents * max(1, len(self.distinct)) + self.ids)
        return is_repeated(codes)

    def matching(self, mask: Any) -> np.ndarray:
        """[N] a boolean pyarrow array over `distinct`, for each part."""
        return to_numpy(mask)[self.ids]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[D] the sum over the parts of each document."""
        totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return totals[self.offsets[1:]] - totals[self.offsets[:-1]]

    def share(self, mask: np.ndarray) -> np.ndarray:
        """[D] the share of a document's parts for which `mask` is true; 0 without parts."""
        return self.sum(mask) / np.maximum(self.counts, 1)


class TextBlock:
    """The texts of some documents; each measure is computed when it is first needed."""

    def __init__(self, texts: Any):
        self.texts = texts  # pyarrow array of large_string, without nulls

    def __len__(self) -> int:
        return len(self.texts)

    @cached_property
    def characters(self) -> np.ndarray:
        """[D]"""
        return to_numpy(pc.utf8_length(self.texts)).astype(np.int64)

    @cached_property
    def words(self) -> TextParts:
        """Parts between white space. Languages that do not separate words have very long ones."""
        return _split(pc.utf8_split_whitespace(self.texts))

    @cached_property
    def lines(self) -> TextParts:
        """Parts between newlines."""
        return _split(pc.split_pattern(self.texts, "\n"))

    @cached_property
    def paragraphs(self) -> TextParts:
        """Parts between empty lines."""
        return _split(pc.split_pattern_regex(pc.utf8_trim_whitespace(self.texts), "\n{2,}"))

    def count(self, text: str) -> np.ndarray:
        """[D] how often `text` occurs."""
        return to_numpy(pc.count_substring(self.texts, text)).astype(np.int64)


def divide_into_blocks(texts: Any) -> Iterator[tuple[int, Any]]:
    """(position of the first, texts) of blocks of up to BLOCK_BYTES; a longer text is a block."""
    ends = np.cumsum(to_numpy(pc.binary_length(texts)), dtype=np.int64)
    start = 0
    while start < len(texts):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + BLOCK_BYTES, side="right")))
        yield start, texts.slice(start, end - start)
        start = end


def to_numpy(array: Any) -> np.ndarray:
    """A pyarrow array without nulls."""
    return array.to_numpy(zero_copy_only=False)


def number_distinct(keys: np.ndarray) -> np.ndarray:
    """Number equal keys equally, in the order in which they first occur."""
    return to_numpy(pa.array(keys).dictionary_encode().indices).astype(np.int64)


def is_repeated(codes: np.ndarray) -> np.ndarray:
    """Whether each number of `number_distinct` occurred before; a new one exceeds all before it."""
    highest = np.maximum.accumulate(codes)
    return np.concatenate([[False], codes[1:] <= highest[:-1]])[: len(codes)]


def _split(parts: Any) -> TextParts:
    """The parts of each document that are not blank; `parts` is a list array."""
    encoded = parts.flatten().dictionary_encode()
    ids = to_numpy(encoded.indices).astype(np.int64)
    offsets = to_numpy(parts.offsets).astype(np.int64)
    offsets -= offsets[0]
    blank = to_numpy(pc.equal(pc.utf8_trim_whitespace(encoded.dictionary), ""))
    if blank.any():
        kept = ~blank[ids]
        offsets = np.concatenate([[0], np.cumsum(kept)])[offsets]
        ids = ids[kept]
    return TextParts(encoded.dictionary, ids, offsets)
