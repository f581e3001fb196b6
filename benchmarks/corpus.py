"""A corpus of random ids; speed does not depend on their values."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest


def write_corpus(folder: Path, vocab_size: int, documents: int = 800) -> Path:
    """Write documents of 10,000 ids each to folder/train; returns the folder."""
    (folder / "train").mkdir(parents=True)
    ids = np.random.default_rng(0).integers(0, vocab_size, (documents, 10_000))
    with ShardWriter(folder / "train" / "shard", vocab_size) as writer:
        for document in ids:
            writer.add(document)
        record = writer.close()
    write_corpus_manifest(folder / "train", "random", vocab_size, [record])
    flat = ids.astype(np.uint32).ravel()
    np.save(folder / "ids.npy", flat)  # for programs that do not read shards
    return folder


def open_ids(folder: Path) -> np.ndarray:
    """The ids of `write_corpus` as one memory-mapped array [N]."""
    return np.load(folder / "ids.npy", mmap_mode="r")
