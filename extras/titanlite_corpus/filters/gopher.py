"""The quality rules of Gopher: length, words, symbols, bullets, ellipses, stop words.

Source: Rae et al. 2021, section A1.1, https://arxiv.org/abs/2112.11446. The paper does not define a
word; here it is a part between white space.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite.settings import Fraction, NotNegative
from titanlite_corpus.filters.rule import Check, RuleResult, above, below
from titanlite_corpus.filters.text_block import TextBlock, TextParts, number_distinct, to_numpy

BULLETS = ("•", "-")
ELLIPSES = ("...", "…")


@dataclass(frozen=True)
class GopherQualityConfig:
    """[filter.gopher_quality] Quality rules of Gopher (arxiv.org/abs/2112.11446, section A1.1)."""

    min_words: NotNegative = 50  # words, without those that are only symbols
    max_words: NotNegative = 100_000  # as above
    min_mean_word_length: float = 3.0  # characters, of the same words
    max_mean_word_length: float = 10.0  # as above
    max_hashes_per_word: float = 0.1  # "#"
    max_ellipses_per_word: float = 0.1  # "..." and "…"
    max_bullet_lines: Fraction = 0.9  # share of lines that begin with "•" or "-"
    max_ellipsis_lines: Fraction = 0.3  # share of lines that end with an ellipsis
    min_alphabetic_words: Fraction = 0.8  # share of words with at least one letter
    min_stop_words: NotNegative = 2  # distinct ones
    stop_words: list[str] = field(
        default_factory=lambda: ["the", "be", "to", "of", "and", "that", "have", "with"]
    )
    # of English; upper and lower case differ


class GopherQualityRule:
    """The rule "gopher_quality"."""

    def __init__(self, config: GopherQualityConfig):
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure all documents of the block."""
        config, words, lines = self._config, block.words, block.lines
        # \p{P}: punctuation, \p{S}: symbols, \p{C}: control characters, \p{L}: letters
        normal = words.matching(pc.match_substring_regex(words.distinct, r"[^\p{P}\p{S}\p{C}]"))
        normal_count = words.sum(normal)
        mean_length = words.sum(words.lengths * normal) / np.maximum(normal_count, 1)
        word_count = np.maximum(words.counts, 1)
        ellipses = sum((block.count(text) for text in ELLIPSES), np.zeros(len(block), np.int64))
        alphabetic = words.matching(pc.match_substring_regex(words.distinct, r"\p{L}"))
        checks: list[Check] = [
            below("too_few_words", normal_count, config.min_words),
            above("too_many_words", normal_count, config.max_words),
            below("short_words", mean_length, config.min_mean_word_length),
            above("long_words", mean_length, config.max_mean_word_length),
            above("hashes", block.count("#") / word_count, config.max_hashes_per_word),
            above("ellipses", ellipses / word_count, config.max_ellipses_per_word),
            above("bullet_lines", _share_of_bullets(lines), config.max_bullet_lines),
            above("ellipsis_lines", _share_of_ellipses(lines), config.max_ellipsis_lines),
            below("non_alphabetic_words", words.share(alphabetic), config.min_alphabetic_words),
            below("stop_words", _stop_words(words, config.stop_words), config.min_stop_words),
        ]
        return RuleResult(checks)


def _share_of_bullets(lines: TextParts) -> np.ndarray:
    trimmed = pc.utf8_ltrim_whitespace(lines.distinct)
    masks = [to_numpy(pc.starts_with(trimmed, bullet)) for bullet in BULLETS]
    return lines.share(np.any(masks, axis=0)[lines.ids])


def _share_of_ellipses(lines: TextParts) -> np.ndarray:
    trimmed = pc.utf8_rtrim_whitespace(lines.distinct)
    masks = [to_numpy(pc.ends_with(trimmed, ellipsis)) for ellipsis in ELLIPSES]
    return lines.share(np.any(masks, axis=0)[lines.ids])


def _stop_words(words: TextParts, stop_words: list[str]) -> np.ndarray:
    """[D] number of distinct stop words in each document."""
    is_stop_word = to_numpy(pc.is_in(words.distinct, pa.array(stop_words, pa.large_string())))
    positions = np.flatnonzero(is_stop_word[words.ids])
    documents, ids = words.documents[positions], words.ids[positions]
    codes = number_distinct(documents * max(1, len(words.distinct)) + ids)
    _, first = np.unique(codes, return_index=True)
    return np.bincount(documents[first], minlength=len(words.counts))
