"""The interface of a rule, which measures the documents of a block and removes or changes some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from titanlite_corpus.filters.text_block import TextBlock


@dataclass(frozen=True)
class Check:
    """One reason to remove a document: its value, and whether that is outside the limits."""

    name: str
    values: Sequence[Any] | np.ndarray  # [D] what is compared with the threshold
    failed: np.ndarray  # [D]


@dataclass(frozen=True)
class TextChange:
    """One way in which a rule changes texts."""

    name: str
    parts: np.ndarray  # [D] lines removed, addresses replaced, … in each document
    example: Callable[[int], str]  # what was changed in a document, as a sample


@dataclass(frozen=True)
class RuleResult:
    """What a rule does to a block. The first check that a document fails is its reason."""

    checks: Sequence[Check] = ()
    texts: Any = None  # pyarrow array of the new texts; None: no text is changed
    changes: Sequence[TextChange] = ()


class Rule(Protocol):
    """One entry of `filter.rules`."""

    def apply(self, block: TextBlock, kept: np.ndarray) -> RuleResult:
        """Measure a block; what it returns for documents that are not `kept` is ignored."""
        ...


def below(name: str, values: np.ndarray, low: float) -> Check:
    """Documents with a value below `low` fail."""
    return Check(name, values, values < low)


def above(name: str, values: np.ndarray, high: float) -> Check:
    """Documents with a value above `high` fail."""
    return Check(name, values, values > high)
