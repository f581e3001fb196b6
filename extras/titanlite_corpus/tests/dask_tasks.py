"""Functions that run on the workers of a test; few imports, as workers are started again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from titanlite.errors import DataError, UserErrors
from titanlite_corpus.engine import report_progress


def word_of_a_dead_worker(out: Path, inputs: list[Path], arguments: dict) -> dict:
    """A task whose first worker is killed half-way."""
    (out / "word").write_text(arguments["word"])
    first = Path(arguments["first"])
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"words": 1}


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise UserErrors([DataError("a.jsonl:3: is not JSON.", fix="Fix it."), DataError("second")])


def run_until_cancelled(started: str, ended: str) -> None:
    Path(started).touch()
    try:
        while True:
            time.sleep(0.02)
            report_progress()
    finally:
        Path(ended).touch()
