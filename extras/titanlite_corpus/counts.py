"""What each stage counts: the JSON in the record of a task, which adds up over tasks.

Every stage has these keys, as far as they apply to it; all other keys are its own.

- `documents_in`, `documents_out`, `bytes_in`, `bytes_out` (of text, in UTF-8), `tokens_out`
- `sources`: {name of the source: {`documents_in`: …, `documents_out`: …, `bytes_in`: …, …}}
- `tokenised`: {name of the source: {`bytes`: of text, `tokens`: made of it}}
- `lengths_in`, `lengths_out`: {"n": documents with 2^n to 2^(n+1) - 1 bytes of text}
- `removed`: {rule: {`documents`: removed by it, `bytes`: of text removed by it}}
- `changed`: {rule: {`documents`: changed by it, `parts`: lines removed, addresses replaced, …}}
- `samples`: {rule: [{`origin`: …, `text`: …, `value`: what was compared with the threshold}]}, of
  what was removed, changed or found; at most 10 a rule, of at most 500 characters each, chosen by
  hash
- `unread`: {suffix: files in the folders of the inputs that are not read}
- `clusters`: {"n": clusters of n documents}, of near duplicates or of equal texts
- `seconds`: of the process that ran the task

Over tasks, numbers are added and samples are chosen again; the order of the tasks does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]
import xxhash

from titanlite_corpus.documents import SOURCE, TEXT

SAMPLES, SAMPLE_CHARACTERS = 10, 500  # of a rule; of a sample
SAMPLES_KEY = "samples"


def count_tables(before: Any, after: Any) -> dict[str, Any]:
    """Documents, bytes, sources and lengths of the table that a stage read and the one it wrote."""
    return merge_counts([count_table(before, "in"), count_table(after, "out")])


def count_table(table: Any, side: str) -> dict[str, Any]:
    """Documents, bytes, sources and lengths of a table; side: "in" or "out"."""
    sizes = pc.binary_length(table[TEXT]).to_numpy().astype(np.int64)
    return {
        f"documents_{side}": len(sizes),
        f"bytes_{side}": int(sizes.sum()),
        f"lengths_{side}": _count_lengths(sizes),
        "sources": {
            name: {f"documents_{side}": documents, f"bytes_{side}": size}
            for name, documents, size in _count_sources(table, sizes)
        },
    }


def _count_lengths(sizes: np.ndarray) -> dict[str, int]:
    """{"n": documents of 2^n to 2^(n+1) - 1 bytes}; an empty one counts as 1 byte."""
    powers = np.bincount(np.frexp(np.maximum(sizes, 1))[1] - 1)
    return {str(power): int(count) for power, count in enumerate(powers) if count}


def _count_sources(table: Any, sizes: np.ndarray) -> Iterable[tuple[str, int, int]]:
    """(name, documents, bytes) of each source in a table."""
    if not len(sizes):
        return
    names = table[SOURCE].unify_dictionaries().combine_chunks()
    names = names.combine_chunks() if isinstance(names, pa.ChunkedArray) else names
    ids = names.indices.to_numpy(zero_copy_only=False)
    documents = np.bincount(ids, minlength=len(names.dictionary))
    size = np.bincount(ids, weights=sizes, minlength=len(names.dictionary))
    for number, name in enumerate(names.dictionary.to_pylist()):
        if documents[number]:
            yield name, int(documents[number]), int(size[number])


def choose_samples(rule: str, origins: Iterable[str], count: int = SAMPLES) -> list[int]:
    """The positions of at most `count` samples, by the hash of rule and origin."""
    digest = xxhash.xxh3_64_intdigest
    hashed = ((digest(f"{rule} {o}".encode()), o, n) for n, o in enumerate(origins))
    return [position for *_, position in nsmallest(count, hashed)]


def shorten_sample(text: str) -> str:
    """The beginning of a text, as a sample."""
    return text if len(text) <= SAMPLE_CHARACTERS else text[: SAMPLE_CHARACTERS - 1] + "…"


def merge_counts(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The counts of several tasks as one: numbers are added, samples are chosen again."""
    total: dict[str, Any] = {}
    for part in parts:
        _add(total, part)
    for rule, samples in total.get(SAMPLES_KEY, {}).items():
        chosen = choose_samples(rule, [sample["origin"] for sample in samples])
        total[SAMPLES_KEY][rule] = [samples[n] for n in chosen]
    return total


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, dict):
            _add(total.setdefault(key, {}), value)
        elif isinstance(value, list):
            total.setdefault(key, []).extend(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            total[key] = total.get(key, 0) + value
        else:
            total[key] = value
