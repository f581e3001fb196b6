"""The quality rules of FineWeb: punctuation, short lines, repeated lines, many newlines.

Source: Penedo et al. 2024, section 3.5, https://arxiv.org/abs/2406.17557; the thresholds are those
of datatrove's fineweb_quality_filter.py (https://github.com/huggingface/datatrove).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite.settings import Fraction, NotNegative
from titanlite_corpus.filters.rule import RuleResult, above, below
from titanlite_corpus.filters.text_block import TextBlock

# Characters that end a sentence, in all scripts: the property Sentence_Terminal of Unicode 16
# (https://www.unicode.org/Public/16.0.0/ucd/PropList.txt), as code points and ranges of them.
_SENTENCE_TERMINAL = """
21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E
1735-1736 17D4-17D5 1803 1809 1944-1945 1AA8-1AAB 1B4E-1B4F 1B5A-1B5B 1B5E-1B5F 1B7D-1B7F
1C3B-1C3C 1C7E-1C7F 2024 203C-203D 2047-2049 2CF9-2CFB 2E2E 2E3C 2E53-2E54 2E60-2E61 3002
A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE12
FE15-FE16 FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89
11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239 1123B-1123C
112A9 113D4-113D5 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946
11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38
16B44 16D6E-16D6F 16E98 1BC9F 1DA88
"""


@dataclass(frozen=True)
class FineWebConfig:
    """[filter.fineweb] Quality rules of FineWeb (arxiv.org/abs/2406.17557, section 3.5)."""

    min_punctuated_lines: Fraction = 0.12  # share of lines that end a sentence
    max_short_lines: Fraction = 0.67  # share of lines of at most short_line_characters
    short_line_characters: NotNegative = 30  # longest line that is short
    max_repeated_line_characters: Fraction = 0.01  # share of characters, newlines not counted
    max_newlines_per_word: float = 0.3  # newline characters divided by words


class FineWebRule:
    """The rule "fineweb"."""

    def __init__(self, config: FineWebConfig):
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure all documents of the block."""
        config, lines = self._config, block.lines
        last = pc.utf8_slice_codeunits(lines.distinct, -1)
        punctuated = lines.share(lines.matching(pc.is_in(last, sentence_ends())))
        short = lines.share(lines.lengths <= config.short_line_characters)
        newlines = block.count("\n")
        characters = np.maximum(block.characters - newlines, 1)
        repeated = lines.sum(lines.lengths * lines.repeated) / characters
        newlines_per_word = newlines / np.maximum(block.words.counts, 1)
        return RuleResult(
            [
                below("punctuated_lines", punctuated, config.min_punctuated_lines),
                above("short_lines", short, config.max_short_lines),
                above("repeated_lines", repeated, config.max_repeated_line_characters),
                above("newlines", newlines_per_word, config.max_newlines_per_word),
            ]
        )


@cache
def sentence_ends() -> Any:
    """The characters that end a sentence, as a pyarrow array."""
    ends: list[str] = []
    for entry in _SENTENCE_TERMINAL.split():
        first, _, last = entry.partition("-")
        ends += map(chr, range(int(first, 16), int(last or first, 16) + 1))
    return pa.array(ends, pa.large_string())
