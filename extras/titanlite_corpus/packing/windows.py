"""Plan which parts of documents are in which window, and write the windows as a shard.

A document of more than `seq_len` + 1 ids is split. Its parts overlap by one id, so every id is
still a label once, except the first one of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.data.manifest import ShardRecord
from titanlite.data.packed import BEGINS, ID_MASK, UNTRAINED
from titanlite_corpus.engine import report_progress
from titanlite_corpus.packing.best_fit import pack_best_fit
from titanlite_corpus.shard_writer import EntryWriter, describe_shard
from titanlite_corpus.token_chunks import TokenChunk

_CHUNK_IDS = 1 << 22  # of windows that are filled together: about 100 MB in memory


@dataclass(frozen=True)
class WindowPlan:
    """The parts of documents in all windows, in the order in which they are written."""

    size: int  # ids of a window
    windows: int
    starts: np.ndarray  # int64 [parts]: of each part, its first id among the ids of all documents
    lengths: np.ndarray  # int64 [parts]: its ids
    window: np.ndarray  # int64 [parts], ascending
    truncated: int  # documents that are split or shortened
    dropped: int  # documents of one id, which have no label

    @property
    def tokens(self) -> int:
        """Ids in all windows, without the padding."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> int:
        """Positions after the last document of each window."""
        return self.windows * self.size - self.tokens


def plan_windows(documents: np.ndarray, seq_len: int, *, split: bool = True) -> WindowPlan:
    """Pack documents of the given lengths (int [N], in the order of their ids) by best fit.

    A document longer than a window is split, or, unless `split`, loses its end. Windows are in the
    order of their first documents, and documents in a window in their own order. Needs about 100
    bytes a document.
    """
    documents = documents.astype(np.int64)
    first_ids = np.cumsum(documents) - documents
    labels = np.maximum(documents - 1, 0) if split else np.clip(documents - 1, 0, seq_len)
    whole, rest = np.divmod(labels, seq_len)  # labels fill whole windows, and a part of one
    number_in_document = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(first_ids, whole) + number_in_document * seq_len
    rest_starts, rest = (first_ids + whole * seq_len)[rest > 0], rest[rest > 0]
    bins, count = pack_best_fit(rest + 1, seq_len + 1)
    starts = np.concatenate([rest_starts, whole_starts])
    lengths = np.concatenate([rest + 1, np.full(len(whole_starts), seq_len + 1)])
    window = np.concatenate([bins, count + np.arange(len(whole_starts))])
    windows = count + len(whole_starts)
    earliest = np.full(windows, np.iinfo(np.int64).max)
    np.minimum.at(earliest, window, starts)
    place = np.empty(windows, dtype=np.int64)  # of each window in the order of `earliest`
    place[np.argsort(earliest, kind="stable")] = np.arange(windows)
    window = place[window]
    order = np.lexsort((starts, window))
    return WindowPlan(
        size=seq_len + 1,
        windows=windows,
        starts=starts[order],
        lengths=lengths[order],
        window=window[order],
        truncated=int((documents > seq_len + 1).sum()),
        dropped=int((documents < 2).sum()),
    )


def count_truncated(documents: np.ndarray, seq_len: int, first: int = 0) -> int:
    """Documents that concatenation truncates: some of their labels are in another sample.

    `first`: position of the first document in the corpus.
    """
    documents = documents.astype(np.int64)
    last_inputs = first + np.cumsum(documents) - 2  # the inputs that predict the last ids
    first_inputs = last_inputs - (documents - 2)
    crosses = first_inputs // seq_len != last_inputs // seq_len
    return int((crosses & (documents > 1)).sum())


def fill_windows(plan: WindowPlan, entries: np.ndarray, padding_id: int) -> Iterator[np.ndarray]:
    """The windows of `plan`, some at a time: int32 [n, size].

    `entries` are the ids of all documents, which may be marked UNTRAINED.
    """
    size = plan.size
    together = max(1, _CHUNK_IDS // size)
    for first in range(0, plan.windows, together):
        count = min(together, plan.windows - first)
        parts = slice(*plan.window.searchsorted([first, first + count]))
        lengths, rows = plan.lengths[parts], plan.window[parts] - first
        before = np.cumsum(lengths) - lengths  # ids of earlier parts
        used = np.bincount(rows, weights=lengths, minlength=count).astype(np.int64)
        offsets = before - (np.cumsum(used) - used)[rows] + rows * size
        within = np.arange(lengths.sum())
        out = np.full(count * size, padding_id | UNTRAINED, dtype=np.int32)
        targets = np.repeat(offsets - before, lengths) + within
        out[targets] = entries[np.repeat(plan.starts[parts] - before, lengths) + within]
        out[offsets] |= BEGINS | UNTRAINED
        padded = np.flatnonzero(used < size)
        out[padded * size + used[padded]] |= BEGINS
        windows = out.reshape(count, size)
        _mark_packed(windows, padding_id)
        yield windows


def _mark_packed(windows: np.ndarray, end: int) -> None:
    """Mark one label UNTRAINED in each window that has `end` inside but no UNTRAINED label.

    Only ignored labels distinguish a packed window from concatenated documents, which end at each
    `end` (titanlite/labels.py). The label after an `end` is untrained between documents, too.
    """
    labels, is_end = windows[:, 1:], (windows[:, :-1] & ID_MASK) == end
    is_end[:, -1] = False  # it is not inside
    trained = ((labels & UNTRAINED) == 0).all(axis=1)
    rows = np.flatnonzero(trained & is_end.any(axis=1))
    labels[rows, is_end[rows].argmax(axis=1)] |= UNTRAINED


@dataclass(frozen=True)
class PackSettings:
    """How the documents of a tokenised shard become windows."""

    seq_len: int
    padding_id: int  # the tokenizer's EOS
    split: bool = True  # split longer documents; else they lose their ends


def pack_shard(
    prefix: Path, out: Path, settings: PackSettings
) -> tuple[ShardRecord, dict[str, Any]]:
    """Pack the documents of a shard into a shard of windows; returns its record and counts.

    Reads the ids through a memory map. Needs about 100 bytes a document, and 100 MB.
    """
    entries, starts = TokenChunk(prefix).read()
    lengths = np.diff(starts)
    plan, untrained, max_id = plan_windows(lengths, settings.seq_len, split=settings.split), 0, -1
    with EntryWriter(out) as writer:
        for windows in fill_windows(plan, entries, settings.padding_id):
            untrained += int(np.count_nonzero(windows[:, 1:] & UNTRAINED))
            max_id = max(max_id, int((windows & ID_MASK).max()))
            writer.add_documents(windows.ravel(), np.full(len(windows), plan.size))
            report_progress()
        record = writer.close()
    documents = len(lengths) - plan.dropped
    counts = {
        "documents_in": len(lengths),
        "documents_out": documents,
        "documents_truncated": plan.truncated,
        "documents_truncated_if_concatenated": count_truncated(lengths, settings.seq_len),
        "tokens_in": int(lengths.sum()),
        "tokens_out": plan.tokens,
        "windows": plan.windows,
        "padding": plan.padding,
        "labels": plan.windows * settings.seq_len,
        "labels_ignored": untrained,
    }
    return describe_shard(record, documents, max_id), counts
