"""Describe samples: where they are from, their documents, ids and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data import TEXT, Corpus, CorpusChecks, SampleStream, SourceConfig, Tokenizer
from titanlite.data.dump import add_content
from titanlite.data.open_files import OpenFiles
from titanlite.data.packed import PackedSource
from titanlite.data.remote_shards import open_shards
from titanlite.data.urls import is_data_url
from titanlite.errors import DataError, printable
from titanlite.files import parse_json, read_regular_file
from titanlite_corpus.inspection.documents import CorpusDocuments
from titanlite_corpus.inspection.search import search_corpus

MEGATRON = "megatron"  # the data format whose files record where documents are
DEFAULT_SEQ_LEN = 2048  # of samples of a corpus that is not packed
_MAX_POSITION = 1 << 62  # fits int64 with all that is added to it
SHOWN_CHARACTERS = 400  # of a text in a terminal: half from its start, half from its end
SampleRecord = dict[str, Any]  # JSON values


def open_unverified(path: str) -> Corpus:
    """A corpus, packed or not, without comparing its content with its hashes."""
    return open_shards(path, CorpusChecks("off"), OpenFiles(), packed=None)


def packed_seq_len(corpus: Corpus) -> int:
    """Tokens of the windows of a corpus; 0 if it is not packed."""
    return corpus.manifest.packed_seq_len if corpus.manifest else 0


def describe_positions(
    stream: SampleStream, formats: dict[str, str], position: int, count: int
) -> list[SampleRecord]:
    """The samples of `count` positions of a run; `formats`: name of a source -> its format."""
    if position < 0 or count < 1 or position + count > _MAX_POSITION:
        raise DataError(f"position {position}, {count} samples: there are no such positions.")
    documents: dict[str, CorpusDocuments] = {}
    samples = stream.locate(position, count)
    inputs, labels = stream.read(position, count)
    for sample, ids, targets in zip(samples, inputs.tolist(), labels.tolist(), strict=True):
        add_content(sample, ids, targets, stream.tokenizer)
        path = sample["path"]
        if formats.get(sample["source"]) == MEGATRON and not is_data_url(path):
            if path not in documents:
                documents[path] = CorpusDocuments(open_unverified(path))
            _add_documents(sample, documents[path])
    return samples


def describe_corpus_samples(
    path: str, seq_len: int | None, sample: int, count: int, tokenizer: Tokenizer | None
) -> list[SampleRecord]:
    """Samples of a corpus in the order of its files; raises DataError.

    `seq_len`: None for DEFAULT_SEQ_LEN, or for that of packed windows.
    """
    corpus = open_unverified(path)
    if packed_seq_len(corpus):
        return _describe_windows(corpus, seq_len, sample, count, tokenizer)
    length = seq_len or DEFAULT_SEQ_LEN
    numbers = _numbers(path, (corpus.tokens - 1) // length, length, sample, count)
    documents, described = _local_documents(corpus), []
    for number in numbers:
        first = number * length
        record: SampleRecord = {"path": path, "sample": number, "first_token": first}
        ids = corpus.read(first, length + 1).tolist()
        add_content(record, ids[:-1], ids[1:], tokenizer)
        if documents:
            _add_documents(record, documents)
        described.append(record)
    return described


def _describe_windows(
    corpus: Corpus, seq_len: int | None, sample: int, count: int, tokenizer: Tokenizer | None
) -> list[SampleRecord]:
    """Windows of a packed corpus; raises DataError."""
    path, length = corpus.path, packed_seq_len(corpus)
    if seq_len not in (None, length):
        raise DataError(
            f"{path}: is packed in windows of {length} tokens; --seq-len is {seq_len}.",
            fix="Remove --seq-len.",
        )
    source = PackedSource(corpus, length)
    numbers = _numbers(path, corpus.tokens // (length + 1), length, sample, count)
    windows, labels = source.gather_windows(np.array(numbers))
    described = []
    for number, ids, targets in zip(numbers, windows.tolist(), labels.tolist(), strict=True):
        record = {"path": path, "sample": number, "first_token": number * (length + 1)}
        add_content(record, ids[:-1], targets, tokenizer)
        described.append(record)
    return described


def _numbers(path: str, total: int, seq_len: int, sample: int, count: int) -> range:
    """`count` samples from `sample` on, of `total`; raises DataError."""
    if not 0 <= sample < total:
        raise DataError(
            f"{path}: has {total} samples of {seq_len} tokens; there is no sample {sample}.",
            fix=f"Use 0 to {total - 1}." if total else "Use a smaller --seq-len.",
        )
    return range(sample, min(total, sample + count))


def find_text(
    source: SourceConfig, text: str, seq_len: int, tokenizer: Tokenizer
) -> Iterator[SampleRecord]:
    """Where a text is in a corpus, in order; raises DataError."""
    if source.format == TEXT:
        raise DataError(
            f'{source.path}: has format = "{TEXT}": it has no ids to search.',
            fix="Search the text itself, for example with grep.",
        )
    corpus = open_unverified(source.path)
    if source.format != MEGATRON or packed_seq_len(corpus):
        raise DataError(
            f"{source.path}: cannot be searched: only {MEGATRON} shards without packing can.",
            fix="Search the text that they were made from, for example with grep.",
        )
    documents = _local_documents(corpus)
    for match in search_corpus(corpus, tokenizer, text):
        yield {
            "source": source.name,
            "path": source.path,
            "first_token": match.token,
            "sample": max(0, match.token - 1) // seq_len,  # in which its first token is a label
            "documents": [documents.at(match.token).to_json()] if documents else [],
            "text": match.text,
        }


def read_dump(path: Path) -> list[SampleRecord]:
    """The samples of a batch that a guard wrote to `guard/step-N.json`; raises DataError."""
    try:
        content = parse_json(read_regular_file(path))
        samples = content["samples"]
        if not all(isinstance(sample, dict) and "position" in sample for sample in samples):
            raise ValueError("its samples have no positions")
        for sample in samples:
            format_sample(sample, full=True)  # fails where a field has another type
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}).",
            fix="Give a file that the guard wrote, such as outputs/run/guard/step-70.json.",
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: is not a batch that the guard wrote ({error}).") from None
    return samples


def _local_documents(corpus: Corpus) -> CorpusDocuments | None:
    """The documents of a corpus on this machine; None for one by URL, whose indexes stay there."""
    return None if is_data_url(corpus.path) else CorpusDocuments(corpus)


def _add_documents(sample: SampleRecord, documents: CorpusDocuments) -> None:
    first = sample["first_token"]
    found = documents.between(first, first + len(sample["tokens"]))
    sample["documents"] = [document.to_json() for document in found]


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
    lines += [f"  | {line}" for line in _shorten_text(text, full).split("\n")]
    return printable("\n".join(lines))


def _shorten_text(text: str, full: bool) -> str:
    """The beginning and the end of a long text, unless `full`."""
    if not full and len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        left_out = len(text) - SHOWN_CHARACTERS
        text = f"{text[:half]} … {left_out} characters … {text[-half:]}"
    return text
