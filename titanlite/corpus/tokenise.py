"""Stage "tokenise": tables of documents -> token ids, divided into training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.corpus.documents import TEXT, read_tables, text_bytes
from titanlite.corpus.engine import report_progress
from titanlite.corpus.prepare import TRAIN, VALIDATION, is_held_out
from titanlite.corpus.task import Counts, Task
from titanlite.corpus.token_chunks import write_chunk
from titanlite.data.tokenizer import Tokenizer, open_tokenizer
from titanlite.errors import DataError


def plan_tokenising(
    tables: Sequence[Task], tokenizer: Tokenizer, validation_share: float, bos: bool
) -> list[Task]:
    """One task for each task that writes tables."""
    arguments = {
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "validation_share": validation_share,
        "bos": bos,
    }
    return [Task("tokenise", tokenise_tables, arguments, (task.key,)) for task in tables]


def tokenise_tables(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a tokenise task: a chunk of ids for each table and side."""
    tokenizer = _open_once(arguments["tokenizer"], arguments["fingerprint"])
    begin = [tokenizer.bos_id] if arguments["bos"] else []
    sides: dict[str, dict[str, int]] = {}
    counts = {"documents_in": 0, "bytes_in": 0, "documents_out": 0, "tokens_out": 0}
    for chunk, table in enumerate(read_tables(inputs[0])):
        counts["documents_in"] += table.num_rows
        counts["bytes_in"] += text_bytes(table)
        for side, texts in _divide(table[TEXT].to_pylist(), arguments["validation_share"]).items():
            ids, lengths = _encode(texts, tokenizer, begin)
            write_chunk(out, side, chunk, ids, lengths, tokenizer.vocab_size)
            entry = sides.setdefault(side, {"documents": 0, "tokens": 0})
            entry["documents"] += len(lengths)
            entry["tokens"] += len(ids)
    counts["documents_out"] = sum(entry["documents"] for entry in sides.values())
    counts["tokens_out"] = sum(entry["tokens"] for entry in sides.values())
    return {**counts, "sides": sides, "vocab_size": tokenizer.vocab_size}


@lru_cache(maxsize=1)
def _open_once(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer of a worker, for all its tasks; raises DataError if its file has changed."""
    tokenizer = open_tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f'tokenizer "{path}": its file has changed since the command began.',
            fix="Run the same command again.",
        )
    return tokenizer


def _divide(texts: Sequence[str], validation_share: float) -> dict[str, list[str]]:
    """The texts of each side that has some; copies of a text are on the same side."""
    if not validation_share:
        return {TRAIN: list(texts)} if texts else {}
    sides: dict[str, list[str]] = {}
    for text in texts:
        side = VALIDATION if is_held_out(text, validation_share) else TRAIN
        sides.setdefault(side, []).append(text)
    return sides


def _encode(
    texts: Sequence[str], tokenizer: Tokenizer, begin: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(ids of all documents, each with `begin` and EOS; length of each document)."""
    first, last = np.array(begin, np.int32), np.array([tokenizer.eos_id], np.int32)
    parts: list[np.ndarray] = []
    for number, text in enumerate(texts):
        parts += (first, tokenizer.encode_array(text), last)
        if number % 256 == 0:
            report_progress()
    lengths = np.fromiter(map(len, parts), np.int64, len(parts)).reshape(-1, 3).sum(1)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe"), lengths
