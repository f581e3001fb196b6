"""The context that every benchmark case runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CaseContext:
    """The arguments of a benchmark case."""

    corpus: Path  # folder with random ids of quickstart's vocabulary; a case may write files there
    rounds: int  # number of measurements
    peer: bool = False  # also compare with transformers' Trainer
