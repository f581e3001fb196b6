"""Remove documents that are too short or too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from titanlite.settings import NotNegative
from titanlite_corpus.filters.rule import RuleResult, above, below
from titanlite_corpus.filters.text_block import TextBlock


@dataclass(frozen=True)
class LengthConfig:
    """[filter.length] Length of documents."""

    min_characters: NotNegative = 1  # shorter documents are removed
    max_characters: NotNegative = 0  # 0: no limit
    min_words: NotNegative = 0  # documents with fewer words are removed
    max_words: NotNegative = 0  # 0: no limit


class LengthRule:
    """The rule "length"."""

    def __init__(self, config: LengthConfig):
        self._config = config

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure all documents of the block."""
        config, characters = self._config, block.characters
        checks = [below("few_characters", characters, config.min_characters)]
        if config.max_characters:
            checks.append(above("many_characters", characters, config.max_characters))
        if config.min_words:
            checks.append(below("few_words", block.words.counts, config.min_words))
        if config.max_words:
            checks.append(above("many_words", block.words.counts, config.max_words))
        return RuleResult(checks)
