"""Chunks of token ids, which one stage writes and the next reads, in the format of a shard.

A chunk has the documents of one side (training or validation) of one table: "train-000003" has the
training documents of the task's table 3. Sorted chunks have the documents' keys in a file beside
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.data.manifest import shard_paths
from titanlite_corpus.shard_writer import ShardWriter, read_document_lengths


@dataclass(frozen=True)
class TokenChunk:
    """A chunk in a task's folder."""

    prefix: Path

    @property
    def number(self) -> int:
        """The number of its table in the task."""
        return int(self.prefix.name.rpartition("-")[2])

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """(memory-mapped ids, [D + 1] where each document begins in them, and the last one ends)"""
        bin, idx = shard_paths(self.prefix)
        lengths, id_type = read_document_lengths(idx)
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        ids = np.memmap(bin, id_type, "r") if starts[-1] else np.empty(0, id_type)
        return ids, starts

    def read_keys(self) -> np.ndarray:
        """The keys of the documents of a sorted chunk, ascending."""
        return np.load(self.prefix.with_suffix(".npy"), mmap_mode="r")


def write_chunk(
    folder: Path,
    side: str,
    number: int,
    ids: np.ndarray,
    lengths: np.ndarray,
    vocab_size: int,
    keys: np.ndarray | None = None,
) -> None:
    """Write one chunk; `keys` are those of a sorted one."""
    prefix = folder / f"{side}-{number:06}"
    with ShardWriter(prefix, vocab_size, durable=False) as writer:  # the task flushes it
        writer.add_documents(ids, lengths)
        writer.close()
    if keys is not None:
        np.save(prefix.with_suffix(".npy"), keys)


def list_chunks(folder: Path, side: str) -> Iterator[TokenChunk]:
    """The chunks of a side, in order."""
    for path in sorted(folder.glob(f"{side}-*.idx")):
        yield TokenChunk(path.with_suffix(""))


def gather_documents(ids: np.ndarray, starts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The ids of the documents in `order`, one after the other."""
    first, last = starts[order].tolist(), starts[order + 1].tolist()
    parts = [ids[a:b] for a, b in zip(first, last, strict=True)]
    return np.concatenate(parts) if parts else ids[:0]
