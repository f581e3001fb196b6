"""The repetition rules of Gopher: repeated lines, paragraphs and n-grams.

Source: Rae et al. 2021, table A1, https://arxiv.org/abs/2112.11446. What is counted as repeated
follows datatrove, with whose counts FineWeb was made
(https://github.com/huggingface/datatrove, gopher_repetition_filter.py): a line counts from
its second occurrence on; n-grams are read from the first word on, and after a repeated one the next
begins after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from titanlite.errors import ConfigError
from titanlite.settings import Fraction
from titanlite_corpus.filters.rule import Check, RuleResult, above
from titanlite_corpus.filters.text_block import (
    TextBlock,
    TextParts,
    is_repeated,
    number_distinct,
)

TOP_SIZES = (2, 3, 4)  # of n-grams whose most frequent one is counted
REPEATED_SIZES = (5, 6, 7, 8, 9, 10)  # of n-grams that are all counted


@dataclass(frozen=True)
class GopherRepetitionConfig:
    """[filter.gopher_repetition] Repetition rules of Gopher (arxiv.org/abs/2112.11446, tab. A1)."""

    max_repeated_lines: Fraction = 0.3  # share of lines
    max_repeated_paragraphs: Fraction = 0.3  # share of paragraphs
    max_repeated_line_characters: Fraction = 0.2  # share of characters in repeated lines
    max_repeated_paragraph_characters: Fraction = 0.2  # in repeated paragraphs
    max_top_ngram: list[Fraction] = field(default_factory=lambda: [0.2, 0.18, 0.16])
    # share of characters in the most frequent n-gram of 2, 3 and 4 words
    max_repeated_ngrams: list[Fraction] = field(
        default_factory=lambda: [0.15, 0.14, 0.13, 0.12, 0.11, 0.10]
    )
    # share of characters in all repeated n-grams of 5, 6, 7, 8, 9 and 10 words


class GopherRepetitionRule:
    """The rule "gopher_repetition"."""

    def __init__(self, config: GopherRepetitionConfig):
        for name, sizes in (("max_top_ngram", TOP_SIZES), ("max_repeated_ngrams", REPEATED_SIZES)):
            if len(values := getattr(config, name)) != len(sizes):
                raise ConfigError(
                    f"filter.gopher_repetition.{name} = {values}: must be {len(sizes)} numbers, for"
                    f" n-grams of {', '.join(map(str, sizes))} words."
                )
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure all documents of the block."""
        config, characters = self._config, np.maximum(block.characters, 1)
        limits = (
            ("paragraphs", config.max_repeated_paragraphs),
            ("paragraph_characters", config.max_repeated_paragraph_characters),
            ("lines", config.max_repeated_lines),
            ("line_characters", config.max_repeated_line_characters),
        )
        parts = (block.paragraphs, block.lines)
        shares = [share for part in parts for share in _repeated_shares(part, characters)]
        checks: list[Check] = [
            above(f"repeated_{name}", share, limit)
            for (name, limit), share in zip(limits, shares, strict=True)
        ]
        top = dict(zip(TOP_SIZES, config.max_top_ngram, strict=True))
        repeated = dict(zip(REPEATED_SIZES, config.max_repeated_ngrams, strict=True))
        for ngrams in find_repeated_ngrams(block.words, max(REPEATED_SIZES)):
            if (size := ngrams.size) in top:
                share = ngrams.characters_of_most_frequent() / characters
                checks.append(above(f"top_{size}_gram", share, top[size]))
            elif size in repeated:
                share = ngrams.repeated_characters(repeated[size] * characters) / characters
                checks.append(above(f"repeated_{size}_grams", share, repeated[size]))
        return RuleResult(checks)


def _repeated_shares(parts: TextParts, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of the parts that occurred before in the document, and of the characters in them."""
    repeated = parts.repeated
    return parts.share(repeated), parts.sum(parts.lengths * repeated) / characters


@dataclass(frozen=True)
class RepeatedNgrams:
    """The n-grams that occur at least twice in their document."""

    size: int  # n
    positions: np.ndarray  # [M] of the first word of each occurrence, increasing
    codes: np.ndarray  # [M] equal for equal n-grams of a document; in order of first occurrence
    words: TextParts
    ends: np.ndarray  # [N + 1] characters of all words before each

    def _documents(self) -> np.ndarray:
        return self.words.documents[self.positions]

    def _lengths(self) -> np.ndarray:
        return self.ends[self.positions + self.size] - self.ends[self.positions]

    def characters_of_most_frequent(self) -> np.ndarray:
        """[D] occurrences x length of the most frequent n-gram, words joined by spaces."""
        totals = np.zeros(len(self.words.counts), np.int64)
        if len(self.codes):
            _, first, counts = np.unique(self.codes, return_index=True, return_counts=True)
            documents = self._documents()[first]
            best = np.lexsort((first, -counts, documents))  # the first of the most frequent
            best = best[np.unique(documents[best], return_index=True)[1]]
            sizes = self._lengths()[first[best]] + self.size - 1
            totals[documents[best]] = counts[best] * sizes
        return totals

    def repeated_characters(self, limits: np.ndarray) -> np.ndarray:
        """[D] characters in repeated n-grams; exact above `limits`, an upper bound below.

        The bound counts every word that is in any repeated n-gram. It is below the limit for most
        documents, whose n-grams then need not be read one after the other.
        """
        documents, repeated = self._documents(), is_repeated(self.codes)
        starts = self.positions[repeated]
        change = np.zeros(len(self.words.ids) + 1, np.int64)
        np.add.at(change, starts, 1)
        np.add.at(change, starts + self.size, -1)
        covered = np.cumsum(change[:-1]) > 0
        totals = self.words.sum(self.words.lengths * covered)
        bounds = np.searchsorted(documents, np.arange(len(totals) + 1))
        lengths = self._lengths()
        for document in np.flatnonzero(totals > limits):
            part = slice(bounds[document], bounds[document + 1])
            totals[document] = self._read_in_order(part, lengths)
        return totals

    def _read_in_order(self, part: slice, lengths: np.ndarray) -> int:
        """Characters in repeated n-grams of one document, none of which overlap."""
        seen: set[int] = set()
        total = after = 0
        rows = (self.positions[part].tolist(), self.codes[part].tolist(), lengths[part].tolist())
        for position, code, length in zip(*rows, strict=True):
            if position < after:
                continue
            if code in seen:
                total += length
                after = position + self.size
            else:
                seen.add(code)
        return total


def find_repeated_ngrams(words: TextParts, largest: int) -> Iterator[RepeatedNgrams]:
    """Yield the repeated n-grams of all documents, for n = 2 … largest.

    An n-gram is repeated only if both (n-1)-grams in it are; these two also identify it. So the
    work decreases with n, and no hash is needed.
    """
    ends = np.concatenate([[0], np.cumsum(words.lengths)])
    keys = words.documents * max(1, len(words.distinct)) + words.ids
    positions, codes = _keep_repeated(np.arange(len(keys)), keys)
    for size in range(2, largest + 1):
        # A pair across two documents occurs once, as their codes are different, and is dropped.
        neighbours = np.flatnonzero(np.diff(positions) == 1)
        keys = codes[neighbours] * (codes.max(initial=0) + 1) + codes[neighbours + 1]
        positions, codes = _keep_repeated(positions[neighbours], keys)
        yield RepeatedNgrams(size, positions, codes, words, ends)


def _keep_repeated(positions: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions whose key occurs at least twice, and numbers of their keys."""
    codes = number_distinct(keys)
    repeated = (np.bincount(codes) > 1)[codes] if len(codes) else np.zeros(0, bool)
    return positions[repeated], number_distinct(codes[repeated])
