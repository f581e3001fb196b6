"""Decontamination: find the documents that contain n-grams of words of benchmark texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from titanlite.data.manifest import hash_file
from titanlite.errors import DataError
from titanlite.files import parse_json
from titanlite_corpus.deduplicate.config import list_benchmark_files
from titanlite_corpus.deduplicate.words import hash_ngrams, hash_words
from titanlite_corpus.engine import report_progress

_NGRAMS = "ngrams.npy"
_FILTER_BITS = 24  # 16 MiB: fits into most caches; with 10^6 n-grams, 6 % of all others pass


def hash_benchmark_files(names: list[str]) -> list[list[str]]:
    """[path, hash of the content] of each benchmark file: arguments of a task."""
    return [[str(path), hash_file(path)] for path in list_benchmark_files(names)]


def write_benchmark_ngrams(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: the sorted hashes of all n-grams of benchmark files; raises DataError.

    arguments: files ([path, hash]), benchmark_ngram_words. Texts with fewer words have no n-gram.
    """
    found, texts, short = [np.zeros(0, np.uint64)], 0, 0
    for path, _ in arguments["files"]:
        column = pa.array(_read_benchmark(Path(path)), pa.large_string())
        for words in hash_words(column):
            ngrams = hash_ngrams(words, arguments["benchmark_ngram_words"])
            long = words.counts >= arguments["benchmark_ngram_words"]
            found.append(ngrams.hashes[np.repeat(long, ngrams.counts)])
            texts, short = texts + len(long), short + int(np.count_nonzero(~long))
        report_progress()
    hashes = np.unique(np.concatenate(found))
    if not len(hashes):
        raise DataError(
            f"deduplicate.benchmarks: none of the {texts:,} texts has"
            f" {arguments['benchmark_ngram_words']} words.",
            fix="Use a smaller deduplicate.benchmark_ngram_words, or other files.",
        )
    np.save(out / _NGRAMS, hashes)
    return {"benchmark_texts": texts, "benchmark_texts_too_short": short, "ngrams": len(hashes)}


def _read_benchmark(path: Path) -> list[str]:
    """A text for each benchmark example: all strings of a row or line, joined."""
    try:
        if path.suffix == ".txt":
            return [path.read_text("utf-8")]
        if path.suffix == ".jsonl":
            lines = path.read_bytes().splitlines()
            return ["\n".join(_strings_in(parse_json(line))) for line in lines if line.strip()]
        return ["\n".join(_strings_in(row)) for row in pq.read_table(path).to_pylist()]
    except (ValueError, OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as a benchmark ({error}).") from None


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(child)


class BenchmarkIndex:
    """The n-grams of benchmarks, to be looked up in documents."""

    def __init__(self, hashes: np.ndarray):
        self._hashes = hashes
        self._filter = np.zeros(1 << _FILTER_BITS, bool)
        self._filter[self._top_bits(hashes)] = True

    @classmethod
    def open(cls, folder: Path) -> BenchmarkIndex:
        """Read what `write_benchmark_ngrams` wrote."""
        return cls(np.load(folder / _NGRAMS))

    def count_matches(self, texts: Any, ngram_words: int) -> np.ndarray:
        """Number of different benchmark n-grams in each text of an Arrow array, int64."""
        totals = np.zeros(len(texts), np.int64)
        for words in hash_words(texts):
            ngrams = hash_ngrams(words, ngram_words)
            likely = np.flatnonzero(self._filter[self._top_bits(ngrams.hashes)])
            hashes = ngrams.hashes[likely]
            place = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
            hit = self._hashes[place] == hashes
            document = np.searchsorted(np.cumsum(ngrams.counts), likely[hit], side="right")
            different = np.unique(np.stack([document, place[hit]]), axis=1)
            totals += np.bincount(different[0] + words.first, minlength=len(texts))
            report_progress()
        return totals

    def _top_bits(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> np.uint64(64 - _FILTER_BITS)).astype(np.intp)
