"""Stage "tokenise": tables of documents -> token ids, divided into training and validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.open_tokenizer import open_tokenizer
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite_corpus.chat.encode import ENTRY_RANGE, ChatEncoder
from titanlite_corpus.chat.lines import LeftOutError
from titanlite_corpus.chat.template import ChatTemplate, open_chat_template
from titanlite_corpus.counts import choose_samples, merge_counts, shorten_sample
from titanlite_corpus.documents import ORIGIN, SOURCE, TEXT, read_tables, text_bytes
from titanlite_corpus.engine import report_progress
from titanlite_corpus.sides import TRAIN, VALIDATION, is_held_out
from titanlite_corpus.task import Counts, Task
from titanlite_corpus.token_chunks import write_chunk


@dataclass(frozen=True)
class TokeniseSettings:
    """How documents become ids, and which of them are validation data."""

    validation_share: float
    bos: bool  # begin each document with BOS; without effect on chats
    template: ChatTemplate | None = None  # the documents are chats, or pairs
    last_only: bool = False  # of the answers of a chat, only the last one is trained on
    pair_window: int = 0  # ids of the window that a pair must fit in; 0: no pairs


def plan_tokenising(
    tables: Sequence[Task], tokenizer: Tokenizer, settings: TokeniseSettings
) -> list[Task]:
    """One task for each task that writes tables."""
    arguments: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "fingerprint": tokenizer.fingerprint,
        "validation_share": settings.validation_share,
    }
    if settings.template is None:
        arguments["bos"] = settings.bos
    else:
        arguments["template"] = settings.template.name
        arguments["template_fingerprint"] = settings.template.fingerprint
        arguments["last_only"] = settings.last_only
        arguments["pair_window"] = settings.pair_window
    return [Task("tokenise", tokenise_tables, arguments, (task.key,), 4) for task in tables]


def tokenise_tables(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a tokenise task: a chunk of ids for each table and side."""
    tokenizer = _open_unchanged(arguments["tokenizer"], arguments["fingerprint"])
    encode, id_range = _choose_encoder(tokenizer, arguments)
    sides: dict[str, dict[str, int]] = {}
    source = ""  # the same in all tables of a task
    counts = {"documents_in": 0, "bytes_in": 0, "documents_out": 0, "tokens_out": 0}
    left_out: list[Counts] = []
    for chunk, table in enumerate(read_tables(inputs[0])):
        source = table[SOURCE][0].as_py()
        counts["documents_in"] += table.num_rows
        counts["bytes_in"] += text_bytes(table)
        documents = zip(table[TEXT].to_pylist(), table[ORIGIN].to_pylist(), strict=True)
        for side, part in _divide(documents, arguments["validation_share"]).items():
            ids, lengths, part_left_out = encode(part)
            left_out.append(part_left_out)
            write_chunk(out, side, chunk, ids, lengths, id_range)
            entry = sides.setdefault(side, {"documents": 0, "tokens": 0})
            entry["documents"] += len(lengths)
            entry["tokens"] += len(ids)
    counts["documents_out"] = sum(entry["documents"] for entry in sides.values())
    counts["tokens_out"] = sum(entry["tokens"] for entry in sides.values())
    tokenised = {"bytes": counts["bytes_in"], "tokens": counts["tokens_out"]}
    by_source = {"sides": sides, "tokenised": {source: tokenised} if source else {}}
    return {**counts, **merge_counts(left_out), **by_source}


# (text, origin) of some documents -> (ids of all of them, length of each, counts of others)
_Encode = Callable[[Sequence[tuple[str, str]]], tuple[np.ndarray, np.ndarray, Counts]]


def _choose_encoder(tokenizer: Tokenizer, arguments: Any) -> tuple[_Encode, int]:
    """(encoder of the documents, exclusive upper bound of what it writes)."""
    if (name := arguments.get("template")) is None:
        begin = [tokenizer.bos_id] if arguments["bos"] else []
        return partial(_encode_texts, tokenizer, begin), tokenizer.vocab_size
    fingerprint, window = arguments["template_fingerprint"], arguments["pair_window"]
    encoder = _open_chat_encoder(tokenizer, name, fingerprint, arguments["last_only"])
    encode = encoder.encode_pair if window else encoder.encode
    return partial(_encode_chats, encode, window=window), ENTRY_RANGE


@lru_cache(maxsize=1)
def _open_chat_encoder(
    tokenizer: Tokenizer, name: str, fingerprint: str, last_only: bool
) -> ChatEncoder:
    """The encoder of a worker, for all its tasks; raises DataError if its file has changed."""
    template = open_chat_template(name, tokenizer)
    if template.fingerprint != fingerprint:
        raise DataError(
            f'template "{name}": its file has changed since the command began.',
            fix="Run the same command again.",
        )
    return ChatEncoder(tokenizer, template, last_only)


@lru_cache(maxsize=1)
def _open_unchanged(path: str, fingerprint: str) -> Tokenizer:
    """The tokenizer of a worker, for all its tasks; raises DataError if its file has changed."""
    tokenizer = open_tokenizer(path)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f'tokenizer "{path}": its file has changed since the command began.',
            fix="Run the same command again.",
        )
    return tokenizer


def _divide(
    documents: Iterable[tuple[str, str]], validation_share: float
) -> dict[str, list[tuple[str, str]]]:
    """The documents of each side that has some; copies of a text are on the same side."""
    sides: dict[str, list[tuple[str, str]]] = {}
    for document in documents:
        held_out = validation_share and is_held_out(document[0], validation_share)
        sides.setdefault(VALIDATION if held_out else TRAIN, []).append(document)
    return sides


def _encode_texts(
    tokenizer: Tokenizer, begin: list[int], documents: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray, Counts]:
    """(ids of all documents, each with `begin` and EOS; length of each document; no counts)."""
    first, last = np.array(begin, np.int32), np.array([tokenizer.eos_id], np.int32)
    parts: list[np.ndarray] = []
    for number, (text, origin) in enumerate(documents):
        try:
            parts += (first, tokenizer.encode_array(text), last)
        except DataError as error:
            raise DataError(f"{origin}: {error.message}", error.fix) from None
        if number % 256 == 0:
            report_progress()
    lengths = np.fromiter(map(len, parts), np.int64, len(parts)).reshape(-1, 3).sum(1)
    return np.concatenate(parts, dtype=np.int32, casting="unsafe"), lengths, {}


def _encode_chats(
    encode: Callable[[str, str], np.ndarray], documents: Sequence[tuple[str, str]], window: int = 0
) -> tuple[np.ndarray, np.ndarray, Counts]:
    """(entries of all documents, length of each, counts of those left out), from (text, origin).

    `encode`: a method of an encoder. Longer documents than `window`, if given, are left out too.
    """
    parts: list[np.ndarray] = []
    left_out: dict[str, list[tuple[str, str]]] = {}
    for number, document in enumerate(documents):
        try:
            entries = encode(*document)
            if window and len(entries) > window:
                raise LeftOutError("longer_than_window")
            parts.append(entries)
        except LeftOutError as reason:
            left_out.setdefault(f"tokenise.{reason}", []).append(document)
        if number % 256 == 0:
            report_progress()
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return np.concatenate([np.empty(0, np.int32), *parts]), lengths, _count_left_out(left_out)


def _count_left_out(left_out: Mapping[str, Sequence[tuple[str, str]]]) -> Counts:
    """`removed` and `samples` of the documents (text, origin) that a rule left out."""
    counts: Counts = {"removed": {}, "samples": {}}
    for rule, documents in left_out.items():
        size = sum(len(text.encode()) for text, _ in documents)
        counts["removed"][rule] = {"documents": len(documents), "bytes": size}
        chosen = choose_samples(rule, [origin for _, origin in documents])
        counts["samples"][rule] = [
            {"origin": documents[n][1], "text": shorten_sample(documents[n][0])} for n in chosen
        ]
    return counts
