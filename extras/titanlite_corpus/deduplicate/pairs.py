"""Task that shows a few near duplicates beside the document that is kept, with their similarity."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs

from titanlite.data.random_bits import mix
from titanlite_corpus.counts import SAMPLES, SAMPLES_KEY, shorten_sample
from titanlite_corpus.deduplicate.matching import EXACT, NEAR, read_edges
from titanlite_corpus.deduplicate.minhash import compute_signatures
from titanlite_corpus.deduplicate.words import HashedDocuments, hash_ngrams, hash_words
from titanlite_corpus.documents import ORIGIN, TEXT, read_tables
from titanlite_corpus.engine import report_progress


def compare_pairs(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: samples of near duplicates, chosen by hash, with the document that is kept.

    inputs: the tables, folders of clusters, folders of matches. arguments: offsets (number of each
    table's first document), clusters (how many folders), ngram_words, bands, rows.
    """
    offsets = arguments["offsets"]
    tables, rest = inputs[: len(offsets)], inputs[len(offsets) :]
    pairs = _choose_pairs(rest[: arguments["clusters"]], rest[arguments["clusters"] :])
    wanted: dict[int, set[int]] = {}
    for document in pairs.ravel().tolist():
        table = bisect_right(offsets, document) - 1
        wanted.setdefault(table, set()).add(document - offsets[table])
    found = {
        offsets[table] + row: document
        for table, rows in sorted(wanted.items())
        for row, document in _read_documents_at(tables[table], rows).items()
    }
    samples = [
        _compare_pair(found[removed], found[kept], arguments) for removed, kept in pairs.T.tolist()
    ]
    return {SAMPLES_KEY: {NEAR: samples}}


def _choose_pairs(clusters: list[Path], matches: list[Path]) -> np.ndarray:
    """[2, at most SAMPLES]: removed near duplicates with the smallest hashes, and what is kept."""
    chosen = np.zeros((2, 0), np.int64)
    for folder in clusters:
        edges = read_edges([folder])
        edges = edges[:, edges[1] < edges[0]]
        if edges.size:
            exact = read_edges(matches, edges[0, 0], edges[0, -1] + 1, f"{EXACT}.npy")
            edges = edges[:, ~np.isin(edges[0], exact[0])]
        both = np.concatenate([chosen, edges], axis=1)
        chosen = both[:, np.argsort(mix(both[0].astype(np.uint64)), kind="stable")[:SAMPLES]]
        report_progress()
    return chosen


def _read_documents_at(folder: Path, rows: set[int]) -> dict[int, dict[str, Any]]:
    found, start = {}, 0
    for table in read_tables(folder):
        for row in sorted(row for row in rows if start <= row < start + table.num_rows):
            found[row] = table.slice(row - start, 1).to_pylist()[0]
        start += table.num_rows
        report_progress()
    return found


def _compare_pair(removed: dict[str, Any], kept: dict[str, Any], arguments: Any) -> dict[str, Any]:
    sets, signatures = [], []
    for document in (removed, kept):
        words = list(hash_words(pa.array([document[TEXT]], pa.large_string())))
        ngrams: HashedDocuments = hash_ngrams(words[0], arguments["ngram_words"])
        sets.append(np.unique(ngrams.hashes))
        signatures.append(compute_signatures(ngrams, arguments["bands"] * arguments["rows"]))
    common = len(np.intersect1d(sets[0], sets[1], assume_unique=True))
    return {
        "origin": removed[ORIGIN],
        "text": shorten_sample(removed[TEXT]),
        "kept_origin": kept[ORIGIN],
        "kept_text": shorten_sample(kept[TEXT]),
        "value": round(common / (len(sets[0]) + len(sets[1]) - common), 4),
        "estimate": round(float(np.mean(signatures[0] == signatures[1])), 4),
    }
