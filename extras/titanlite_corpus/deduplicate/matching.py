"""Tasks that find duplicates: keys of each table, matches of a range of the keys, clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite_corpus.deduplicate.key_files import (
    count_kinds,
    group_starts,
    read_matching,
    write_keys,
)
from titanlite_corpus.deduplicate.minhash import band_keys, compute_signatures
from titanlite_corpus.deduplicate.stars import (
    connect,
    count_unsettled,
    in_both_directions,
    large_star,
    small_star,
    sort_edges,
)
from titanlite_corpus.deduplicate.words import hash_ngrams, hash_words
from titanlite_corpus.documents import TEXT, read_tables
from titanlite_corpus.engine import report_progress

EXACT, NEAR = "exact", "near"
_EDGES = "edges.npy"


def write_document_keys(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: the keys of a table's documents: hash of the text, and of each band of MinHash.

    arguments: exact, near (booleans), ngram_words, bands, rows.
    """
    exact = [np.zeros(0, np.uint64)]
    near, near_rows = [np.zeros((arguments["bands"], 0), np.uint64)], [np.zeros(0, np.int64)]
    documents = 0
    for table in read_tables(inputs[0]):
        if arguments[EXACT]:
            exact.append(_hash_texts(table[TEXT]))
        for words in hash_words(table[TEXT]) if arguments[NEAR] else ():
            ngrams = hash_ngrams(words, arguments["ngram_words"])
            signatures = compute_signatures(ngrams, arguments["bands"] * arguments["rows"])
            near.append(band_keys(signatures, arguments["bands"]))
            near_rows.append(np.flatnonzero(words.counts) + documents + words.first)
            report_progress()
        documents += table.num_rows
        report_progress()
    if arguments[EXACT]:
        write_keys(out, EXACT, np.concatenate(exact)[None], np.arange(documents))
    if arguments[NEAR]:
        write_keys(out, NEAR, np.concatenate(near, axis=1), np.concatenate(near_rows))
    return {"documents": documents}


def _hash_texts(texts: Any) -> np.ndarray:
    """A 64-bit hash of each text; of 10^9 different texts, about 0.03 pairs have the same hash."""
    digest = xxhash.xxh3_64_intdigest
    hashes = (digest(text.as_buffer() or b"") for text in texts)
    return np.fromiter(hashes, np.uint64, len(texts))


def match_documents(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: edges between documents and the first document with an equal key.

    arguments: offsets (number of each table's first document), part ([p, parts]: range of keys).
    """
    offsets, part = arguments["offsets"], tuple(arguments["part"])
    counts = {}
    exact = found = np.zeros((2, 0), np.int64)
    for name in (EXACT, NEAR):
        for kind in range(count_kinds(inputs[0], name)):
            new = _edges_to_first(*read_matching(inputs, offsets, name, kind, part))
            found = sort_edges(np.concatenate([found, new], axis=1))
            exact = sort_edges(new) if name == EXACT else exact
            report_progress()
    edges = in_both_directions(found)
    np.save(out / f"{EXACT}.npy", exact)
    np.save(out / _EDGES, edges)
    counts["edges"] = edges.shape[1]
    return counts


def _edges_to_first(keys: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Edges [2, edges] from each document to the first one with its key."""
    starts = group_starts(keys)
    firsts = np.repeat(documents[starts], np.diff(np.append(starts, len(keys))))
    later = documents != firsts
    return np.stack([documents[later], firsts[later]])


def connect_documents(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: the clusters of all edges, for edges that fit into one task."""
    np.save(out / _EDGES, connect(read_edges(inputs)))
    return {}


def apply_large_star(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: large-star at the documents [first, last) of `arguments["documents"]`."""
    edges = read_edges(inputs, *arguments["documents"])
    result = large_star(edges)
    np.save(out / _EDGES, result)
    return {"unsettled": count_unsettled(edges), "edges": result.shape[1]}


def apply_small_star(out: Path, inputs: list[Path], arguments: Any) -> dict[str, Any]:
    """Task: small-star at the documents [first, last) of `arguments["documents"]`."""
    result = small_star(read_edges(inputs, *arguments["documents"]))
    np.save(out / _EDGES, result)
    return {"edges": result.shape[1]}


def read_edges(
    folders: list[Path], first: int = 0, last: int | None = None, name: str = _EDGES
) -> np.ndarray:
    """The edges of the documents [first, last) in several folders, sorted, each once."""
    parts = [np.zeros((2, 0), np.int64)]
    for folder in folders:
        edges = np.load(folder / name, mmap_mode="r")
        start = np.searchsorted(edges[0], first)
        end = edges.shape[1] if last is None else np.searchsorted(edges[0], last)
        parts.append(np.array(edges[:, start:end]))
    return sort_edges(np.concatenate(parts, axis=1))
