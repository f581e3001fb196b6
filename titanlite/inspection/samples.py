"""Describe samples: where they are from, their documents, ids and text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.data import CorpusChecks, SampleStream, SourceConfig, Tokenizer, open_corpus
from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file
from titanlite.inspection.documents import CorpusDocuments
from titanlite.inspection.search import search_corpus

MEGATRON = "megatron"  # the data format whose files say where documents are
SHOWN_CHARACTERS = 400  # of a text in a terminal, of which half are its end
SampleRecord = dict[str, Any]  # JSON values


def open_unverified(path: str) -> Any:
    """The corpus in a folder, without comparing its content with its hashes."""
    return open_corpus(path, CorpusChecks("off"))


def describe_positions(
    stream: SampleStream, formats: dict[str, str], position: int, count: int
) -> list[SampleRecord]:
    """The samples of `count` positions of a run; `formats` are those of its sources by name."""
    if position < 0 or count < 1:
        raise DataError(f"position {position}, {count} samples: there are no such positions.")
    documents: dict[str, CorpusDocuments] = {}
    samples = stream.locate(position, count)
    inputs, labels = stream.read(position, count)
    for number, sample in enumerate(samples):
        own = inputs[number].tolist()
        if (last := int(labels[number, -1])) >= 0:
            own.append(last)
        _add_content(sample, own, stream.tokenizer)
        ignored = int((labels[number] < 0).sum())
        if ignored:
            sample["ignored_labels"] = ignored
        path = sample["path"]
        if formats.get(sample["source"]) == MEGATRON and sample["first_token"] is not None:
            if path not in documents:
                documents[path] = CorpusDocuments(open_unverified(path))
            _add_documents(sample, documents[path], len(own))
    return samples


def describe_corpus_samples(
    path: str, seq_len: int, sample: int, count: int, tokenizer: Tokenizer | None
) -> list[SampleRecord]:
    """Samples of a corpus in the order of its files; raises DataError."""
    corpus = open_unverified(path)
    total = (corpus.tokens - 1) // seq_len
    if not 0 <= sample < total:
        raise DataError(
            f"{path}: has {total} samples of {seq_len} tokens; there is no sample {sample}.",
            fix=f"Use 0 to {total - 1}." if total else "Use a smaller --seq-len.",
        )
    documents, described = CorpusDocuments(corpus), []
    for number in range(sample, min(total, sample + count)):
        first = number * seq_len
        record: SampleRecord = {"path": path, "sample": number, "first_token": first}
        _add_content(record, corpus.read(first, seq_len + 1).tolist(), tokenizer)
        _add_documents(record, documents, seq_len + 1)
        described.append(record)
    return described


def find_text(
    source: SourceConfig, text: str, seq_len: int, tokenizer: Tokenizer
) -> Iterator[SampleRecord]:
    """Where a text is in a corpus, in order; raises DataError."""
    if source.format != MEGATRON:
        raise DataError(
            f"{source.path}: has the format {source.format}; only {MEGATRON} can be searched."
        )
    corpus = open_unverified(source.path)
    documents = CorpusDocuments(corpus)
    for match in search_corpus(corpus, tokenizer, text):
        document = documents.at(match.token)
        yield {
            "source": source.name,
            "path": source.path,
            "first_token": match.token,
            "sample": max(0, match.token - 1) // seq_len,  # in which its first token is a label
            "documents": [document.to_json()],
            "text": match.text,
        }


def read_dump(path: Path) -> list[SampleRecord]:
    """The samples of a batch that a guard wrote to `guard/step-N.json`; raises DataError."""
    try:
        content = parse_json(read_regular_file(path))
        samples = content["samples"]
        if not all(isinstance(sample, dict) and "position" in sample for sample in samples):
            raise ValueError("its samples have no positions")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}).",
            fix="Give a file that the guard wrote, such as outputs/run/guard/step-70.json.",
        ) from None
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{path}: is not a batch that the guard wrote ({error}).") from None
    return samples


def _add_content(sample: SampleRecord, tokens: list[int], tokenizer: Tokenizer | None) -> None:
    sample["tokens"] = tokens
    if tokenizer is not None:
        sample["text"] = tokenizer.decode(tokens)


def _add_documents(sample: SampleRecord, documents: CorpusDocuments, count: int) -> None:
    first = sample["first_token"]
    sample["documents"] = [found.to_json() for found in documents.between(first, first + count)]


# --- as text -------------------------------------------------------------------------------------

_LABELS: dict[str, Callable[[Any], str]] = {  # shown in the first line of a sample, in this order
    "position": lambda value: f"position {value}",
    "source": lambda value: f"source {value}",
    "epoch": lambda value: f"epoch {value}",
    "sample": lambda value: f"sample {value}",
    "first_token": lambda value: f"token {value}",
    "ignored_labels": lambda value: f"{value} labels ignored",
}


def format_sample(sample: SampleRecord, full: bool = False) -> str:
    """A sample for a terminal: where it is from, its documents, and its text or ids."""
    lines = ["  ".join(show(sample[k]) for k, show in _LABELS.items() if sample.get(k) is not None)]
    if "path" in sample:
        lines.append(f"  {sample['path']}")
    documents = sample.get("documents") or []
    shown = documents if full or len(documents) <= 4 else [*documents[:2], None, *documents[-1:]]
    for document in shown:
        if document is None:
            lines.append(f"  … {len(documents) - 3} more documents …")
            continue
        begin = sample["first_token"] - document["first_token"]
        where = f", from its token {begin} on" if begin > 0 else ""
        name = f"{document['shard']} document {document['document']}"
        lines.append(f"  {name} ({document['tokens']} tokens{where})")
    if (text := sample.get("text")) is None:
        text = " ".join(map(str, sample.get("tokens", [])))
    lines += [f"  | {line}" for line in printable(text, full).split("\n")]
    return "\n".join(lines)


def printable(text: str, full: bool) -> str:
    """A text that is safe to print: a corpus may contain sequences that control terminals."""
    if not full and len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        left_out = len(text) - SHOWN_CHARACTERS
        text = f"{text[:half]} … {left_out} characters … {text[-half:]}"
    return re.sub(
        r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u200e\u200f\u2028-\u202e\u2066-\u2069]",
        lambda match: f"\\x{ord(match[0]):02x}",
        text,
    )
