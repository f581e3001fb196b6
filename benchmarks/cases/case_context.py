"""What every case is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Given:
    corpus: Path  # random ids of quickstart's vocabulary, and room for a case's own files
    rounds: int  # how often each is measured
    peer: bool = False  # against other trainers too
