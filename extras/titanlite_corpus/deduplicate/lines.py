"""Tasks that remove lines, or paragraphs, which many other documents contain too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import xxhash

from titanlite_corpus.counts import (
    SAMPLES_KEY,
    choose_samples,
    count_tables,
    merge_counts,
    shorten_sample,
)
from titanlite_corpus.deduplicate.key_files import group_starts, read_matching, write_keys
from titanlite_corpus.documents import ORIGIN, TEXT, read_tables, text_bytes, write_tables
from titanlite_corpus.engine import report_progress

LINE = "line"
_SEPARATORS = {"line": "\n", "paragraph": "\n\n"}
_REPEATED = "repeated_lines"  # the rule


def write_line_keys(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: the hashes of a table's lines, each at most once per document.

    arguments: lines ("line" or "paragraph"), line_characters.
    """
    hashes: list[int] = []
    rows: list[int] = []
    documents = 0
    for table in read_tables(inputs[0]):
        for text in table[TEXT].to_pylist():
            of_document = {digest for _, digest in _hash_lines(text, arguments) if digest}
            hashes.extend(of_document)
            rows.extend([documents] * len(of_document))
            documents += 1
        report_progress()
    write_keys(out, LINE, np.array(hashes, np.uint64)[None], np.array(rows, np.uint32))
    return {"documents": documents, "lines": len(hashes)}


def _hash_lines(text: str, arguments: Any) -> Iterator[tuple[str, int]]:
    """Each line, and a hash of it without white space around it; 0 for a short line.

    Of 10^10 different lines, about 3 pairs have the same hash of 64 bits.
    """
    shortest, digest = arguments["line_characters"], xxhash.xxh3_64_intdigest
    for line in text.split(_SEPARATORS[arguments["lines"]]):
        stripped = line.strip()
        yield line, digest(stripped.encode()) if len(stripped) >= shortest else 0


def match_lines(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: (document, hash) of each line to be removed.

    arguments: offsets (number of each table's first document), part ([p, parts]: range of the
    hashes), line_documents (a line in more documents than that remains only in the first).
    """
    keys, documents = read_matching(inputs, arguments["offsets"], LINE, 0, tuple(arguments["part"]))
    starts = group_starts(keys)
    sizes = np.diff(np.append(starts, len(keys)))
    removed = np.repeat(sizes > arguments["line_documents"], sizes)
    removed[starts] = False
    order = np.lexsort((keys[removed], documents[removed]))
    np.save(out / "documents.npy", documents[removed][order])
    np.save(out / "hashes.npy", keys[removed][order])
    return {"repeated_lines": int(np.count_nonzero(sizes > arguments["line_documents"]))}


def remove_lines(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: a table without the lines that `match_lines` found. Empty documents are removed.
    inputs: the table, folders of `match_lines`. arguments: those of `write_line_keys`, documents
    ([first, last): numbers of the table's documents).
    """
    first, last = arguments["documents"]
    hashes_of = _read_removed(inputs[1:], first, last)
    parts: list[dict[str, Any]] = []

    def kept_tables() -> Iterator[Any]:
        start = first
        for table in read_tables(inputs[0]):
            kept, counts = _remove_from_table(table, start, hashes_of, arguments)
            parts.append(counts)
            report_progress()
            yield kept
            start += table.num_rows

    write_tables(out, kept_tables())
    return merge_counts(parts)


def _read_removed(folders: list[Path], first: int, last: int) -> dict[int, set[int]]:
    """Hashes of the lines to be removed from each document."""
    hashes_of: dict[int, set[int]] = {}
    for folder in folders:
        documents = np.load(folder / "documents.npy", mmap_mode="r")
        part = slice(*np.searchsorted(documents, [first, last]))
        hashes = np.load(folder / "hashes.npy", mmap_mode="r")[part]
        for document, digest in zip(documents[part].tolist(), hashes.tolist(), strict=True):
            hashes_of.setdefault(document, set()).add(digest)
    return hashes_of


def _remove_from_table(
    table: Any, start: int, hashes_of: dict[int, set[int]], arguments: Any
) -> tuple[Any, dict[str, Any]]:
    """The table without repeated lines, and its counts; `start`: number of its first document."""
    texts, origins = table[TEXT].to_pylist(), table[ORIGIN].to_pylist()
    separator = _SEPARATORS[arguments["lines"]]
    removed: list[tuple[str, str]] = []  # (origin, line)
    changed, kept = 0, np.ones(len(texts), bool)
    for row in range(len(texts)):
        hashes = hashes_of.get(start + row)
        if hashes is None:
            continue
        lines = list(_hash_lines(texts[row], arguments))
        removed += [(origins[row], line) for line, digest in lines if digest in hashes]
        texts[row] = separator.join(line for line, digest in lines if digest not in hashes)
        kept[row] = bool(texts[row].strip())
        changed += bool(kept[row])
    column = pa.array(texts, pa.large_string())
    result = table.set_column(table.schema.get_field_index(TEXT), TEXT, column)
    result = result.filter(pa.array(kept))
    emptied = table.filter(pa.array(~kept))
    counts = count_tables(table, result)
    counts["changed"] = {_REPEATED: {"documents": changed, "parts": len(removed)}}
    if emptied.num_rows:
        size = text_bytes(emptied)
        counts["removed"] = {_REPEATED: {"documents": emptied.num_rows, "bytes": size}}
    chosen = choose_samples(_REPEATED, (f"{origin} {line}" for origin, line in removed))
    samples = [(removed[n][0], shorten_sample(removed[n][1])) for n in chosen]
    if samples:
        counts[SAMPLES_KEY] = {
            _REPEATED: [{"origin": origin, "text": line} for origin, line in samples]
        }
    return result, counts
