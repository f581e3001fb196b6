"""Task that removes the duplicates and the contaminated documents of a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs

from titanlite_corpus.counts import (
    SAMPLES_KEY,
    choose_samples,
    count_tables,
    merge_counts,
    shorten_sample,
)
from titanlite_corpus.deduplicate.benchmarks import BenchmarkIndex
from titanlite_corpus.deduplicate.key_files import group_starts
from titanlite_corpus.deduplicate.matching import EXACT, NEAR, read_edges
from titanlite_corpus.documents import ORIGIN, TEXT, read_tables, text_bytes, write_tables
from titanlite_corpus.engine import report_progress

BENCHMARK = "benchmark"


def remove_duplicates(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: a table without duplicates of earlier documents and without contaminated documents.

    inputs: the table, folders of clusters, folders of matches, and perhaps that of benchmark
    n-grams. arguments: documents ([first, last): numbers of the table's documents), clusters,
    matches (how many folders of each), benchmark_ngram_words, benchmark_matches.
    """
    first, last = arguments["documents"]
    split = 1 + arguments["clusters"]
    clusters = read_edges(inputs[1:split], first, last)
    matches = inputs[split : split + arguments["matches"]]
    exact = read_edges(matches, first, last, f"{EXACT}.npy")
    reasons = np.zeros(last - first, np.int8)
    reasons[clusters[0, clusters[1] < clusters[0]] - first] = 2
    reasons[exact[0] - first] = 1
    benchmarks = inputs[split + arguments["matches"] :]
    index = BenchmarkIndex.open(benchmarks[0]) if benchmarks else None
    parts: list[dict[str, Any]] = [{"clusters": _count_cluster_sizes(clusters)}]

    def kept_tables() -> Iterator[Any]:
        start = 0
        for table in read_tables(inputs[0]):
            reason = reasons[start : start + table.num_rows]
            if index is not None:
                rest = np.flatnonzero(reason == 0)
                texts = table[TEXT].take(pa.array(rest))
                found = index.count_matches(texts, arguments["benchmark_ngram_words"])
                reason[rest[found >= arguments["benchmark_matches"]]] = 3
            kept = table.filter(pa.array(reason == 0))
            parts.append(_count_removed(table, reason, kept))
            report_progress()
            yield kept
            start += table.num_rows

    write_tables(out, kept_tables())
    return merge_counts(parts)


def _count_cluster_sizes(clusters: np.ndarray) -> dict[str, int]:
    """{number of documents: clusters}, of the clusters whose first document is in the table."""
    firsts = clusters[0, clusters[1] > clusters[0]]
    starts = group_starts(firsts)
    sizes, numbers = np.unique(np.diff(np.append(starts, len(firsts))) + 1, return_counts=True)
    return {str(size): int(number) for size, number in zip(sizes, numbers, strict=True)}


def _count_removed(table: Any, reasons: np.ndarray, kept: Any) -> dict[str, Any]:
    counts = count_tables(table, kept)
    counts["removed"], counts[SAMPLES_KEY] = {}, {}
    for reason, rule in enumerate((EXACT, NEAR, BENCHMARK), 1):
        removed = table.filter(pa.array(reasons == reason))
        if removed.num_rows:
            counts["removed"][rule] = {"documents": removed.num_rows, "bytes": text_bytes(removed)}
            if rule != NEAR:  # compare_pairs() takes the samples of NEAR, which are pairs
                counts[SAMPLES_KEY][rule] = _sample_removed(rule, removed)
    return counts


def _sample_removed(rule: str, removed: Any) -> list[dict[str, Any]]:
    chosen = removed.take(choose_samples(rule, removed[ORIGIN].to_pylist()))
    return [
        {"origin": row[ORIGIN], "text": shorten_sample(row[TEXT])} for row in chosen.to_pylist()
    ]
