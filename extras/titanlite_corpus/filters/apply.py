"""Apply rules to tables of documents, count what each removes, and sample it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]

from titanlite_corpus.counts import choose_samples, count_tables, merge_counts, shorten_sample
from titanlite_corpus.documents import ORIGIN, SOURCE, TEXT, read_tables, write_tables
from titanlite_corpus.engine import report_progress
from titanlite_corpus.filters.config import config_of_arguments, open_rules
from titanlite_corpus.filters.rule import Rule, RuleResult
from titanlite_corpus.filters.text_block import TextBlock, divide_into_blocks, to_numpy

NamedRules = Sequence[tuple[str, Rule]]


def filter_documents(out: Path, inputs: list[Path], arguments: dict[str, Any]) -> dict[str, Any]:
    """The function of a filter task; `arguments` are the result of `filter_arguments`."""
    config = config_of_arguments(arguments)
    rules = _open_rules_once(json.dumps(arguments, sort_keys=True))
    counts: list[dict[str, Any]] = []

    def filtered() -> Iterator[Any]:
        for folder in inputs:
            for table in read_tables(folder):
                kept, of_table = filter_table(table, rules, config.sources)
                counts.append(of_table)
                yield kept

    write_tables(out, filtered())
    return merge_counts(counts)


@lru_cache(maxsize=1)
def _open_rules_once(arguments: str) -> NamedRules:
    """The rules of a worker, for all its tasks."""
    return open_rules(config_of_arguments(json.loads(arguments)))


def filter_table(
    table: Any, rules: NamedRules, sources: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """(the documents that are kept, counts); see `corpus.counts`. Empty `sources`: all of them."""
    columns = table.combine_chunks()
    texts, origins = _chunk(columns[TEXT]), _chunk(columns[ORIGIN])
    included = np.ones(len(texts), bool)
    if sources:
        included = to_numpy(pc.is_in(columns[SOURCE].cast(pa.string()), pa.array(sources)))
    kept = np.zeros(len(texts), bool)
    chunks, counts = [], []
    for start, block in divide_into_blocks(texts):
        report_progress()
        part = slice(start, start + len(block))
        work = _FilteredBlock(block, origins.slice(start, len(block)), included[part])
        work.apply(rules)
        kept[part] = work.kept
        chunks.append(work.kept_texts())
        counts.append(work.counts)
    result = columns.filter(pa.array(kept))
    new = pa.chunked_array(chunks, pa.large_string())
    result = result.set_column(result.schema.get_field_index(TEXT), TEXT, new)
    return result, merge_counts([*counts, count_tables(table, result)])


def _chunk(column: Any) -> Any:
    """A column as one array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


class _FilteredBlock:
    """A block while rules are applied to it.

    The rules see only the documents `_rows`: at first those that are `included`. Removed ones are
    taken out as soon as fewer than half are left, or a text is changed.
    """

    def __init__(self, texts: Any, origins: Any, included: np.ndarray):
        self._texts, self._origins, self._included = texts, origins, included
        self._sizes = to_numpy(pc.binary_length(texts)).astype(np.int64)
        self._rows = np.flatnonzero(included)
        self._block = TextBlock(texts.take(pa.array(self._rows)))
        self._block_kept = np.ones(len(self._rows), bool)
        self.counts: dict[str, Any] = {"removed": {}, "changed": {}, "samples": {}}

    @property
    def kept(self) -> np.ndarray:
        """[D] documents that no rule removed."""
        kept = ~self._included
        kept[self._rows[self._block_kept]] = True
        return kept

    def kept_texts(self) -> Any:
        """The texts of the documents that no rule removed, with all changes."""
        texts = self._texts
        if self._block_kept.any():
            mask = np.zeros(len(texts), bool)
            mask[self._rows[self._block_kept]] = True
            new = self._block.texts.filter(pa.array(self._block_kept))
            texts = pc.replace_with_mask(texts, pa.array(mask), new)
        return texts.filter(pa.array(self.kept))

    def apply(self, rules: NamedRules) -> None:
        """Apply all rules."""
        for name, rule in rules:
            if not len(self._rows):
                return
            result = rule.apply(self._block, self._block_kept)
            for check in result.checks:
                self._remove(f"{name}.{check.name}", check.failed, check.values)
            if result.texts is not None:
                self._change(name, result)
            elif 2 * self._block_kept.sum() < len(self._rows):
                self._narrow(self._block.texts)

    def _remove(self, rule: str, failed: np.ndarray, values: Sequence[Any] | np.ndarray) -> None:
        failed = failed & self._block_kept
        if not failed.any():
            return
        rows = np.flatnonzero(failed)
        size = int(self._sizes[self._rows[rows]].sum())
        self.counts["removed"][rule] = {"documents": len(rows), "bytes": size}
        self._sample(rule, rows, lambda row: self._block.texts[row].as_py(), values)
        self._block_kept &= ~failed

    def _change(self, name: str, result: RuleResult) -> None:
        for change in result.changes:
            changed = np.flatnonzero((change.parts > 0) & self._block_kept)
            if len(changed):
                rule, parts = f"{name}.{change.name}", int(change.parts[changed].sum())
                self.counts["changed"][rule] = {"documents": len(changed), "parts": parts}
                self._sample(rule, changed, change.example, change.parts)
        blank = _is_blank(result.texts) & ~_is_blank(self._block.texts)
        self._remove(f"{name}.empty", blank, self._block.characters)
        self._narrow(result.texts)

    def _narrow(self, texts: Any) -> None:
        """Show the next rules only the documents that are kept, with their new texts."""
        self._block = TextBlock(texts.filter(pa.array(self._block_kept)))
        self._rows = self._rows[self._block_kept]
        self._block_kept = np.ones(len(self._rows), bool)

    def _sample(
        self,
        rule: str,
        rows: np.ndarray,
        text_of: Callable[[int], str],
        values: Sequence[Any] | np.ndarray,
    ) -> None:
        origins = self._origins.take(pa.array(self._rows[rows])).to_pylist()
        self.counts["samples"][rule] = [
            {
                "origin": origins[number],
                "text": shorten_sample(text_of(int(rows[number]))),
                "value": _plain(values[int(rows[number])]),
            }
            for number in choose_samples(rule, origins)
        ]


def _is_blank(texts: Any) -> np.ndarray:
    return to_numpy(pc.equal(pc.utf8_trim_whitespace(texts), ""))


def _plain(value: Any) -> Any:
    """A value as JSON; floats are rounded to four significant digits."""
    if isinstance(value, str):
        return value
    return int(value) if isinstance(value, int | np.integer) else float(f"{value:.4g}")
