"""Read the documents of the tasks in this folder; lm-eval calls these functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_cloze(**_: Any) -> dict[str, Any]:
    """The documents of python_cloze."""
    return _read_documents("python_cloze")


def read_choice(**_: Any) -> dict[str, Any]:
    """The documents of python_choice."""
    return _read_documents("python_choice")


def read_text(**_: Any) -> dict[str, Any]:
    """The documents of python_text."""
    return _read_documents("python_text")


def measure_text(document: dict[str, Any], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood of a document, number of its words or bytes) for each metric."""
    (log_likelihood,), text = results, document["text"]
    words, text_bytes = len(text.split()), len(text.encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, text_bytes),
        "bits_per_byte": (log_likelihood, text_bytes),
    }


def _read_documents(name: str) -> dict[str, Any]:
    from datasets import Dataset  # which lm-eval needs

    lines = Path(__file__).with_name(f"{name}.jsonl").read_text("utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
