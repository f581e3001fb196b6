"""Stages "shuffle" and "shards": the documents of a source in a random order, as shards.

Each document gets a 64-bit key, a hash of the seed and of its place among the source's documents.
"shuffle" sorts each chunk by key. The shard p of P has the keys in the range p of P equal ranges:
a slice of every chunk, merged. So memory is bounded by a chunk and by a shard, whatever the size of
the corpus, and the order depends on the seed and the documents only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.random_bits import GOLDEN, mix
from titanlite.settings import NotNegative
from titanlite_corpus.engine import report_progress
from titanlite_corpus.hashing import find_key_range
from titanlite_corpus.packing.stage import SHARD
from titanlite_corpus.shard_writer import ShardWriter
from titanlite_corpus.sides import TRAIN, VALIDATION
from titanlite_corpus.task import Counts, Task
from titanlite_corpus.token_chunks import gather_documents, list_chunks, write_chunk

_SIDES = {TRAIN: 0, VALIDATION: 1}


@dataclass(frozen=True)
class ShuffleConfig:
    """[shuffle] Put the documents of each source into a random order."""

    seed: NotNegative = 0  # of the random order


def plan_shuffle(chunks: Sequence[Task], config: ShuffleConfig, vocab_size: int) -> list[Task]:
    """One task for each tokenise task of a source: its chunks, sorted by key."""
    return [
        Task(
            "shuffle",
            sort_chunks,
            {"seed": config.seed, "ordinal": ordinal, "vocab_size": vocab_size},
            (task.key,),
        )
        for ordinal, task in enumerate(chunks)
    ]


def sort_chunks(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a shuffle task."""
    documents = tokens = 0
    for side, side_number in _SIDES.items():
        for chunk in list_chunks(inputs[0], side):
            ids, starts = chunk.read()
            place = (arguments["ordinal"], side_number, chunk.number)
            keys = document_keys(arguments["seed"], place, len(starts) - 1)
            order = np.argsort(keys, kind="stable")
            sorted_ids, lengths = gather_documents(ids, starts, order), np.diff(starts)[order]
            vocab_size = arguments["vocab_size"]
            write_chunk(out, side, chunk.number, sorted_ids, lengths, vocab_size, keys[order])
            documents, tokens = documents + len(lengths), tokens + len(ids)
            report_progress()
    return {"documents_out": documents, "tokens_out": tokens}


def document_keys(seed: int, place: Sequence[int], documents: int) -> np.ndarray:
    """The 64-bit keys of a chunk's documents; `place` is that of the chunk in its source."""
    key = np.zeros(1, np.uint64)
    for number in (seed, *place):
        key = mix((key + np.uint64(number + 1)) * GOLDEN)
    return mix((key + np.arange(1, documents + 1, dtype=np.uint64)) * GOLDEN)


# --- shards --------------------------------------------------------------------------------------


def plan_shuffled_shards(
    chunks: Sequence[Task], side: str, shards: int, vocab_size: int
) -> list[Task]:
    """Tasks of the shards of one side of a source, from the tasks of `plan_shuffle`."""
    keys = tuple(task.key for task in chunks)
    return [
        Task(
            "shards",
            merge_key_range,
            {"side": side, "part": part, "parts": shards, "vocab_size": vocab_size},
            keys,
        )
        for part in range(shards)
    ]


def merge_key_range(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a shard task: the documents with keys in one of equal ranges, in order."""
    keys, ids, lengths = [], [], []
    for folder in inputs:
        for chunk in list_chunks(folder, arguments["side"]):
            chunk_keys = chunk.read_keys()
            first, last = find_key_range(chunk_keys, arguments["part"], arguments["parts"])
            chunk_ids, starts = chunk.read()
            keys.append(np.asarray(chunk_keys[first:last]))
            ids.append(np.array(chunk_ids[starts[first] : starts[last]]))
            lengths.append(np.diff(starts[first : last + 1]))
        report_progress()
    order = np.argsort(np.concatenate(keys), kind="stable")
    all_lengths = np.concatenate(lengths)
    starts = np.concatenate([[0], np.cumsum(all_lengths)])
    all_ids = np.concatenate(ids)
    ids.clear()
    with ShardWriter(out / SHARD, arguments["vocab_size"], durable=False) as writer:
        for part in np.array_split(order, max(1, len(order) // 4096)):
            writer.add_documents(gather_documents(all_ids, starts, part), all_lengths[part])
            report_progress()
        return shard_counts(writer)


def plan_ordered_shards(
    chunks: Sequence[Task], sizes: Sequence[int], side: str, shards: int, vocab_size: int
) -> list[Task]:
    """Tasks of the shards of one side without shuffling; `sizes`: tokens of each chunk task."""
    arguments = {"side": side, "vocab_size": vocab_size}
    return [
        Task("shards", join_chunks, arguments, tuple(chunks[n].key for n in group))
        for group in _group_by_size(sizes, shards)
    ]


def _group_by_size(sizes: Sequence[int], groups: int) -> Iterator[list[int]]:
    """Indices of consecutive items, in at most `groups` groups of about equal sums."""
    limit, group, size = -(-sum(sizes) // groups), [], 0
    for index, item in enumerate(sizes):
        group.append(index)
        size += item
        if size >= limit:
            yield group
            group, size = [], 0
    if size:
        yield group


def join_chunks(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a shard task without shuffling: chunks one after the other."""
    with ShardWriter(out / SHARD, arguments["vocab_size"], durable=False) as writer:
        for folder in inputs:
            for chunk in list_chunks(folder, arguments["side"]):
                ids, starts = chunk.read()
                writer.add_documents(ids, np.diff(starts))
                report_progress()
        return shard_counts(writer)


def shard_counts(writer: ShardWriter) -> Counts:
    """Finish a shard; its record for the manifest is among the counts."""
    record = writer.close()
    return {
        "documents_out": record.documents,
        "tokens_out": record.tokens,
        "shard": asdict(record),
    }
