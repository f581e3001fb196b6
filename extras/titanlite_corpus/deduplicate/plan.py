"""The tasks of deduplication.

| stage | tasks | bytes of memory |
|---|---|---|
| `duplicate-keys` | one per table | a table, and 12 per document and band |
| `duplicate-matches` | one per range of the keys | 60 per document in one range of one band |
| `duplicate-clusters` | one per range of documents, in rounds | 120 per edge of its documents |
| `duplicates` | one per table | a table, and 16 per duplicate in it |

How many tasks a stage has follows from counts of the stage before, so the plan is made in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from titanlite_corpus.deduplicate.benchmarks import hash_benchmark_files, write_benchmark_ngrams
from titanlite_corpus.deduplicate.config import DeduplicateConfig
from titanlite_corpus.deduplicate.lines import match_lines, remove_lines, write_line_keys
from titanlite_corpus.deduplicate.matching import (
    apply_large_star,
    apply_small_star,
    connect_documents,
    match_documents,
    write_document_keys,
)
from titanlite_corpus.deduplicate.pairs import compare_pairs
from titanlite_corpus.deduplicate.removal import remove_duplicates
from titanlite_corpus.task import Counts, Task, TaskFunction

RunTasks = Callable[[Sequence[Task]], list[Counts]]


@dataclass(frozen=True)
class PartSizes:
    """How large a task may be; the results do not depend on it."""

    keys: int = 1 << 22  # documents in a range of the keys
    edges: int = 1 << 22  # edges of a range of documents, each in both directions
    lines: int = 1 << 23  # lines in a range of their hashes


def deduplicate(
    tables: Sequence[Task],
    config: DeduplicateConfig,
    run: RunTasks,
    sizes: PartSizes | None = None,
) -> list[Task]:
    """Remove the duplicates in the tables, which are in the order of the corpus.

    `run` runs tasks whose inputs are `tables` or were run before, and returns their counts. The
    result is one task for each of `tables`, in their order.
    """
    result = list(tables)
    planner = _DeduplicationPlanner(config, run, sizes or PartSizes())
    if result and _compares_documents(config):
        result = planner.remove_documents(result)
    if result and config.lines != "off":
        result = planner.remove_lines(result)
    return result


def _compares_documents(config: DeduplicateConfig) -> bool:
    return config.exact or config.near or bool(config.benchmarks)


class _DeduplicationPlanner:
    """Makes and runs the tasks of one stage after the other."""

    def __init__(self, config: DeduplicateConfig, run: RunTasks, sizes: PartSizes):
        self._config, self._run, self._sizes = config, run, sizes

    def remove_documents(self, tables: list[Task]) -> list[Task]:
        """Tasks of tables without duplicates and contaminated documents."""
        config = self._config
        arguments = _select_settings(config, "exact", "near", "ngram_words", "bands", "rows")
        keys = [Task("duplicate-keys", write_document_keys, arguments, (t.key,)) for t in tables]
        offsets = _first_documents(self._run(keys))
        matches: list[Task] = []
        clusters: list[Task] = []
        if config.exact or config.near:
            matches, clusters = self._find_clusters(keys, offsets)
        removal = _select_settings(config, "benchmark_ngram_words", "benchmark_matches")
        removal |= {"clusters": len(clusters), "matches": len(matches)}
        found = _task_keys([*clusters, *matches, *self._index_benchmarks()])
        result = [
            Task("duplicates", remove_duplicates, removal | {"documents": part}, (t.key, *found))
            for t, part in zip(tables, pairwise(offsets), strict=True)
        ]
        self._run(result)
        if config.near:
            pairs = {"offsets": offsets[:-1], "clusters": len(clusters)}
            pairs |= _select_settings(config, "ngram_words", "bands", "rows")
            inputs = _task_keys([*tables, *clusters, *matches])
            self._run([Task("duplicate-pairs", compare_pairs, pairs, inputs)])
        return result

    def _find_clusters(self, keys: list[Task], offsets: list[int]) -> tuple[list[Task], list[Task]]:
        """Tasks of all matches, and tasks whose edges are the stars of the clusters."""
        parts = _count_parts(offsets[-1], self._sizes.keys)
        matches = [
            Task(
                "duplicate-matches",
                match_documents,
                {"offsets": offsets[:-1], "part": [part, parts]},
                _task_keys(keys),
            )
            for part in range(parts)
        ]
        edges, counts = matches, self._run(matches)
        while True:
            parts = _count_parts(sum(count["edges"] for count in counts), self._sizes.edges)
            if parts == 1:
                connected = Task("duplicate-clusters", connect_documents, None, _task_keys(edges))
                self._run([connected])
                return matches, [connected]
            large = self._star_tasks(apply_large_star, edges, offsets[-1], parts)
            if not any(count["unsettled"] for count in self._run(large)):
                return matches, edges
            edges = self._star_tasks(apply_small_star, large, offsets[-1], parts)
            counts = self._run(edges)

    def _star_tasks(
        self, function: TaskFunction, edges: list[Task], documents: int, parts: int
    ) -> list[Task]:
        ranges = pairwise(documents * part // parts for part in range(parts + 1))
        inputs = _task_keys(edges)
        return [Task("duplicate-clusters", function, {"documents": r}, inputs) for r in ranges]

    def _index_benchmarks(self) -> list[Task]:
        """The task of the n-grams of the benchmarks, if there are any."""
        config = self._config
        if not config.benchmarks:
            return []
        arguments = {"files": hash_benchmark_files(config.benchmarks)}
        arguments |= _select_settings(config, "benchmark_ngram_words")
        tasks = [Task("benchmark-ngrams", write_benchmark_ngrams, arguments)]
        self._run(tasks)
        return tasks

    def remove_lines(self, tables: list[Task]) -> list[Task]:
        """Tasks of tables without the lines that many documents have."""
        arguments = _select_settings(self._config, "lines", "line_characters")
        keys = [Task("line-keys", write_line_keys, arguments, (t.key,)) for t in tables]
        counts = self._run(keys)
        offsets = _first_documents(counts)
        parts = _count_parts(sum(count["lines"] for count in counts), self._sizes.lines)
        matching = {"offsets": offsets[:-1]} | _select_settings(self._config, "line_documents")
        matches = [
            Task("line-matches", match_lines, matching | {"part": [part, parts]}, _task_keys(keys))
            for part in range(parts)
        ]
        self._run(matches)
        found = _task_keys(matches)
        result = [
            Task("lines", remove_lines, arguments | {"documents": part}, (t.key, *found))
            for t, part in zip(tables, pairwise(offsets), strict=True)
        ]
        self._run(result)
        return result


def _select_settings(config: DeduplicateConfig, *names: str) -> dict[str, Any]:
    """The settings that a task depends on."""
    return {name: getattr(config, name) for name in names}


def _task_keys(tasks: Sequence[Task]) -> tuple[str, ...]:
    return tuple(task.key for task in tasks)


def _first_documents(counts: Sequence[Counts]) -> list[int]:
    """The number of each table's first document, and the number of all documents."""
    return list(accumulate((count["documents"] for count in counts), initial=0))


def _count_parts(entries: int, most: int) -> int:
    """The number of parts of at most `most` entries."""
    return max(1, -(-entries // most))
