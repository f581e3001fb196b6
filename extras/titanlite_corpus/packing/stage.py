"""Stage "pack": documents of a shard in windows of one length, or a count of truncated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from titanlite.settings import Positive
from titanlite_corpus.packing.windows import PackSettings, count_truncated, pack_shard
from titanlite_corpus.task import Counts, Task
from titanlite_corpus.token_chunks import TokenChunk

SHARD = "shard"  # prefix of the files of a shard, before and after packing


@dataclass(frozen=True)
class PackConfig:
    """[pack] How documents share the samples of a run."""

    mode: Literal["concatenate", "best_fit"] = "concatenate"
    # "concatenate": one after the other, for any training.seq_len; "best_fit": in windows of
    # `seq_len` tokens, so that only longer documents are truncated
    seq_len: Positive = 2048  # of the runs; "concatenate" uses it only to count truncated documents


def plan_packing(shards: Sequence[Task], settings: PackSettings) -> list[Task]:
    """One task for each shard, which writes a shard of windows."""
    return [
        Task("pack", pack_documents, asdict(settings), (task.key,), version=2) for task in shards
    ]


def pack_documents(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a pack task."""
    record, counts = pack_shard(inputs[0] / SHARD, out / SHARD, PackSettings(**arguments))
    return {**counts, "shard": asdict(record)}


def plan_counting(shards: Sequence[Task], tokens: Sequence[int], seq_len: int) -> list[Task]:
    """One task for each shard of `tokens` ids, which counts the documents that are truncated."""
    return [
        Task("pack", count_concatenated, {"first": sum(tokens[:n]), "seq_len": seq_len}, (t.key,))
        for n, t in enumerate(shards)
    ]


def count_concatenated(out: Path, inputs: list[Path], arguments: Any) -> Counts:
    """The function of a task that counts."""
    _, starts = TokenChunk(inputs[0] / SHARD).read()
    lengths = np.diff(starts)
    return {
        "documents_out": len(lengths),
        "documents_truncated": count_truncated(lengths, **arguments),
        "tokens_out": int(lengths.sum()),
    }
