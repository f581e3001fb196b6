"""The rules of C4: lines that are not sentences are removed, then documents with few sentences.

Source: Raffel et al. 2020, section 2.2, https://arxiv.org/abs/1910.10683, and the code that made it
(https://github.com/tensorflow/datasets/blob/master/tensorflow_datasets/text/c4_utils.py), which has
four more rules: words of more than 1,000 characters, lines that end with "...", citations, and
notices about cookies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite.settings import NotNegative
from titanlite_corpus.filters.rule import RuleResult, TextChange, above, below
from titanlite_corpus.filters.text_block import TextBlock, TextParts, to_numpy

POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_CITATION = r"\[\d*\]|\[edit\]|\[citation needed\]"  # of Wikipedia
_TERMINAL = r"""[.?!"']$"""
_SENTENCE_END = r"""[.?!]["'’”)\]]*(\s|$)"""


@dataclass(frozen=True)
class C4Config:
    """[filter.c4] Rules of C4 (arxiv.org/abs/1910.10683, section 2.2)."""

    min_sentences: NotNegative = 5  # in the lines that are kept
    min_words_per_line: NotNegative = 3  # shorter lines are removed
    max_word_length: NotNegative = 1000  # lines with a longer word are removed
    terminal_punctuation: bool = True
    # remove lines that do not end with . ? ! " or ', and those that end with ...
    citations: bool = True  # remove [1], [edit] and [citation needed] from lines
    javascript: bool = True  # remove lines that contain "javascript"
    policies: bool = True  # remove lines about terms of use, privacy and cookies
    lorem_ipsum: bool = True
    # remove documents with "lorem ipsum" in a line that is kept, or that only the two keys above
    # remove
    curly_bracket: bool = True  # the same for "{"


class C4Rule:
    """The rule "c4"."""

    def __init__(self, config: C4Config):
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure and change all documents of the block."""
        config, lines = self._config, block.lines
        trimmed = pc.utf8_trim_whitespace(lines.distinct)
        texts = _remove_citations(trimmed) if config.citations else trimmed
        lower = pc.utf8_lower(texts)
        remaining = np.ones(len(texts), bool)  # of the distinct lines
        changes = []
        for name, mask in self._line_checks(trimmed, texts, lower):
            changes.append(_line_change(name, lines, mask & remaining))
            remaining &= ~mask
            if name == "few_words":  # what follows looks at whole documents, too
                lorem = remaining & _contains(lower, "lorem ipsum") & config.lorem_ipsum
                curly = remaining & _contains(texts, "{") & config.curly_bracket
        if config.citations:
            changed = remaining & to_numpy(pc.not_equal(texts, trimmed))
            changes.append(_line_change("citations", lines, changed))
        sentences = np.maximum(to_numpy(pc.count_substring_regex(texts, _SENTENCE_END)), 1)
        sentences = lines.sum((sentences * remaining)[lines.ids])
        checks = [
            above("lorem_ipsum", lines.sum(lorem[lines.ids]), 0),
            above("curly_bracket", lines.sum(curly[lines.ids]), 0),
            below("few_sentences", sentences, config.min_sentences),
        ]
        return RuleResult(checks, _join_lines(texts, lines, remaining), changes)

    def _line_checks(self, trimmed: Any, texts: Any, lower: Any) -> Iterator[tuple[str, Any]]:
        """(name, which distinct lines are removed), in the order in which they are."""
        config = self._config
        off = np.zeros(len(texts), bool)
        yield "long_word", _has_long_word(trimmed, config.max_word_length)
        unfinished = ~to_numpy(pc.match_substring_regex(texts, _TERMINAL))
        unfinished |= to_numpy(pc.ends_with(texts, "..."))
        yield "no_terminal_punctuation", unfinished if config.terminal_punctuation else off
        words = to_numpy(pc.count_substring_regex(trimmed, r"\S+"))
        yield "few_words", words < config.min_words_per_line
        yield "javascript", _contains(lower, "javascript") if config.javascript else off
        policies = np.any([_contains(lower, policy) for policy in POLICIES], axis=0)
        yield "policies", policies if config.policies else off


def _contains(texts: Any, part: str) -> np.ndarray:
    return to_numpy(pc.match_substring(texts, part))


def _remove_citations(texts: Any) -> Any:
    mask = pc.match_substring(texts, "[")  # few lines: the regex is slower
    changed = pc.replace_substring_regex(texts.filter(mask), _CITATION, "")
    return pc.replace_with_mask(texts, mask, changed)


def _has_long_word(texts: Any, longest: int) -> np.ndarray:
    """Whether a text has a word of more than `longest` characters; few texts are that long."""
    result = np.zeros(len(texts), bool)
    for number in np.flatnonzero(to_numpy(pc.utf8_length(texts)) > longest):
        result[number] = max(map(len, texts[number].as_py().split())) > longest
    return result


def _line_change(name: str, lines: TextParts, mask: np.ndarray) -> TextChange:
    """The change of the distinct lines in `mask`."""
    of_lines = mask[lines.ids]

    def example(document: int) -> str:
        start, end = lines.offsets[document : document + 2]
        first = start + int(np.argmax(of_lines[start:end]))
        return lines.distinct[int(lines.ids[first])].as_py().strip()

    return TextChange(name, lines.sum(of_lines), example)


def _join_lines(texts: Any, lines: TextParts, remaining: np.ndarray) -> Any:
    """The texts of all documents, of the lines that remain."""
    kept = remaining[lines.ids]
    offsets = np.concatenate([[0], np.cumsum(kept)])[lines.offsets]
    strings = texts.take(pa.array(lines.ids[kept])).cast(pa.string())  # no large_string is joined
    parts = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), strings)
    return pc.binary_join(parts, "\n").cast(pa.large_string())
