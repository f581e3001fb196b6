"""Files of sorted keys: each task that matches keys reads its range of the keys of all tables.

A file has one or more kinds of keys: the bands of MinHash are kinds, the hash of the text is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titanlite_corpus.hashing import find_key_range


def write_keys(folder: Path, name: str, keys: np.ndarray, rows: np.ndarray) -> None:
    """Write uint64 keys [kinds, entries], each kind sorted, and the rows of their documents."""
    order = np.argsort(keys, axis=1, kind="stable")
    np.save(folder / f"{name}_keys.npy", np.take_along_axis(keys, order, axis=1))
    np.save(folder / f"{name}_rows.npy", rows.astype(np.uint32)[order])


def count_kinds(folder: Path, name: str) -> int:
    """The number of kinds of keys in a file; 0 if there is none."""
    path = folder / f"{name}_keys.npy"
    return len(np.load(path, mmap_mode="r")) if path.exists() else 0


def read_matching(
    folders: Sequence[Path], offsets: Sequence[int], name: str, kind: int, part: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Keys of one kind that documents share, and the documents, sorted by key and document.

    `offsets` are the numbers of the folders' first documents. `part` = (p, parts) selects a range
    of the keys. Keys that only one entry has are left out.
    """
    found = [_read_key_range(folder, name, kind, part) for folder in folders]
    keys = np.concatenate([keys for keys, _ in found])
    documents = np.concatenate(
        [rows.astype(np.int64) + offset for (_, rows), offset in zip(found, offsets, strict=True)]
    )
    order = np.argsort(keys, kind="stable")  # the folders are in order, so documents are too
    keys = keys[order]
    shared = np.zeros(len(keys), bool)
    equal = keys[1:] == keys[:-1]
    shared[1:] |= equal
    shared[:-1] |= equal
    return keys[shared], documents[order[shared]]


def _read_key_range(
    folder: Path, name: str, kind: int, part: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    keys = np.load(folder / f"{name}_keys.npy", mmap_mode="r")[kind]
    rows = np.load(folder / f"{name}_rows.npy", mmap_mode="r")[kind]
    first, last = find_key_range(keys, *part)
    return np.array(keys[first:last]), np.array(rows[first:last])


def group_starts(sorted_keys: np.ndarray) -> np.ndarray:
    """The index at which each group of equal keys begins."""
    if not len(sorted_keys):
        return np.zeros(0, np.int64)
    return np.flatnonzero(np.append(True, sorted_keys[1:] != sorted_keys[:-1]))
