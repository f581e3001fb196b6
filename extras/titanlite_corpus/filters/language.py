"""Keep documents in some languages, identified by py3langid, whose model is part of its package."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from titanlite.errors import ConfigError
from titanlite.settings import Fraction, Positive
from titanlite_corpus.extras import import_extra
from titanlite_corpus.filters.rule import Check, RuleResult
from titanlite_corpus.filters.text_block import TextBlock


@dataclass(frozen=True)
class LanguageConfig:
    """[filter.language] The languages to keep."""

    keep: list[str] = field(default_factory=lambda: ["en"])  # ISO 639 codes
    min_confidence: Fraction = (
        0.65  # probability of the language (FineWeb: arxiv.org/abs/2406.17557)
    )
    characters: Positive = 1000  # at the beginning of a document, from which it is identified


class LanguageRule:
    """The rule "language"."""

    def __init__(self, config: LanguageConfig):
        self._config, self._identifier = config, _load_identifier()
        if unknown := sorted(set(config.keep) - set(self._identifier.labels)):
            raise ConfigError(
                f"filter.language.keep = {config.keep}: py3langid does not know"
                f" {', '.join(unknown)}.",
                fix=f"Its languages are {' '.join(sorted(self._identifier.labels))}.",
            )

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Identify the language of the documents that are kept."""
        config, classify = self._config, self._identifier.classify
        values = [""] * len(block)
        other, unsure = np.zeros(len(block), bool), np.zeros(len(block), bool)
        for number in np.flatnonzero(kept):
            text = block.texts[int(number)].as_py()[: config.characters]
            language, confidence = classify(text)
            values[number] = f"{language} {confidence:.2f}"
            other[number] = language not in config.keep
            unsure[number] = confidence < config.min_confidence
        checks = [Check("other_language", values, other), Check("not_sure", values, unsure)]
        return RuleResult(checks)


@cache
def _load_identifier() -> Any:
    """Loading takes a second, so once in a process; raises ConfigError."""
    needed_by = 'filter.rules contains "language", which'
    langid = import_extra("py3langid.langid", "languages", needed_by)
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
