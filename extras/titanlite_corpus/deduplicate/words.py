"""Hashes of words and of n-grams of words, by numpy over blocks of text.

A word's hash is a polynomial in its characters' values modulo 2^64, mixed. The sums of a whole
block come from one cumulative sum; the difference of two of them, divided by a power of the odd
base, is the polynomial of one word. An n-gram's hash is a polynomial in its words' hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite.data.random_bits import mix
from titanlite_corpus.deduplicate.characters import (
    IGNORED,
    LETTER,
    SEPARATOR,
    character_kinds,
    character_values,
)

_BLOCK_BYTES = 1 << 18  # of text hashed at once: its arrays fit into the L2 or L3 cache
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_NGRAM_BASE = np.uint64(0xD6E8FEB86659FD93)


@dataclass(frozen=True)
class HashedDocuments:
    """Hashes of the words or n-grams of consecutive documents."""

    first: int  # index of the first document
    hashes: np.ndarray  # uint64 [all hashes]
    counts: np.ndarray  # int64 [documents]: hashes of each document


def hash_words(texts: Any) -> Iterator[HashedDocuments]:
    """Yield the hashes of the words of an Arrow array of strings, in batches of documents."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    texts = texts.cast(pa.large_string())
    _, offset_buffer, data = texts.buffers()
    bounds = np.frombuffer(offset_buffer, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    first = 0
    while first < len(texts):
        limit = bounds[first] + _BLOCK_BYTES
        end = max(first + 1, int(np.searchsorted(bounds, limit, side="right")) - 1)
        content = memoryview(data)[bounds[first] : bounds[end]] if data is not None else b""
        if end == first + 1:
            blocks = [
                _hash_block(block, np.zeros(1, np.int64))
                for block in _split_document(bytes(content))
            ]
            hashes = np.concatenate([block[0] for block in blocks])
            yield HashedDocuments(first, hashes, np.array([len(hashes)]))
        else:
            lengths = pc.utf8_length(texts[first:end]).to_numpy()
            yield HashedDocuments(first, *_hash_block(bytes(content), np.cumsum(lengths) - lengths))
        first = end


def _split_document(content: bytes) -> Iterator[bytes]:
    """Blocks of a document, which end at white space if there is any, or between characters."""
    start = 0
    while len(content) - start > _BLOCK_BYTES:
        end = start + _BLOCK_BYTES
        space = max(content.rfind(b" ", start, end), content.rfind(b"\n", start, end))
        if space > start:
            end = space
        while content[end] & 0xC0 == 0x80:  # a byte within a character
            end -= 1
        yield content[start:end]
        start = end
    yield content[start:]


def _hash_block(content: bytes, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the words of documents that begin at the characters `starts`; their numbers."""
    points = np.frombuffer(content.decode().encode("utf-32-le"), np.uint32).astype(np.intp)
    kinds = character_kinds().take(points)
    if (ignored := kinds == IGNORED).any():
        starts = starts - np.append(0, np.cumsum(ignored))[starts]
        points, kinds = points[~ignored], kinds[~ignored]
    letters, in_word = kinds == LETTER, kinds != SEPARATOR
    begins = in_word.copy()
    begins[1:] &= ~(letters[1:] & letters[:-1])
    inner = starts[starts < len(points)]
    begins[inner] = in_word[inner]  # a document does not continue the last word of another
    words = np.flatnonzero(begins)
    counts = np.diff(np.searchsorted(words, np.append(starts, len(points))))
    if not len(words):
        return np.zeros(0, np.uint64), counts
    powers, inverses = _base_powers()
    sums = np.cumsum(character_values().take(points) * powers[: len(points)])
    hashes = sums[np.append(words[1:], len(points)) - 1]  # separators add 0
    hashes[1:] -= hashes[:-1].copy()
    return mix(hashes * inverses[words]), counts


@cache
def _base_powers() -> tuple[np.ndarray, np.ndarray]:
    """base^i and base^-i modulo 2^64 for each position of a block."""

    def powers(base: int) -> np.ndarray:
        factors = np.full(_BLOCK_BYTES, base, np.uint64)
        factors[0] = 1
        return np.multiply.accumulate(factors)

    return powers(_BASE), powers(pow(_BASE, -1, 1 << 64))


def hash_ngrams(words: HashedDocuments, n: int) -> HashedDocuments:
    """Hashes of the n-grams; a document with fewer than n words has one, of all its words."""
    counts = words.counts
    ends = np.cumsum(counts)
    starts, total = ends - counts, len(words.hashes)
    ngram_counts = np.where(counts > 0, np.maximum(counts - n + 1, 1), 0)
    padded = np.append(words.hashes, np.zeros(n - 1, np.uint64))
    hashes = padded[:total].copy()
    for k in range(1, n):
        hashes *= _NGRAM_BASE
        hashes += padded[k : k + total]
    for document in np.flatnonzero((counts > 0) & (counts < n)):
        hashes[starts[document]] = _hash_short_document(
            words.hashes[starts[document] : ends[document]], n
        )
    valid = np.ones(total, bool)
    for k in range(1, n):  # the last n-1 words of a document begin no n-gram
        positions = ends - k
        valid[positions[positions >= starts + ngram_counts]] = False
    return HashedDocuments(words.first, hashes[valid], ngram_counts)


def _hash_short_document(hashes: np.ndarray, n: int) -> np.uint64:
    """The hash of fewer than n words, as if hashes of 0 followed them."""
    value = 0
    for k in range(n):
        value = (value * int(_NGRAM_BASE) + (int(hashes[k]) if k < len(hashes) else 0)) % (1 << 64)
    return np.uint64(value)
