"""Packed windows on disk: samples of fixed length, with the ids that are not labels marked.

A packed corpus is a folder of Megatron shards with a manifest. A window has `seq_len` + 1 entries;
the windows follow each other, and each is a "document" of the index. An entry is an int32:

    bits 0 to 28   the id
    bit 29         BEGINS: first id of a document, or of the padding behind the last one
    bit 30         UNTRAINED: not a label

So one read gives ids, labels and boundaries of a sample, and the hashes of the manifest cover them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titanlite.data.open_files import OpenFiles
from titanlite.data.remote_shards import open_shards
from titanlite.data.shards import Corpus
from titanlite.data.token_source import CorpusChecks, TokenSource
from titanlite.errors import DataError
from titanlite.labels import DOCUMENT_END, SAME_DOCUMENT

BEGINS, UNTRAINED = np.int32(1 << 29), np.int32(1 << 30)
ID_MASK = np.int32((1 << 29) - 1)


class PackedSource(TokenSource):
    """The windows of a packed corpus."""

    packed_seq_len: int

    def __init__(self, corpus: Corpus, seq_len: int):
        self._corpus, self.packed_seq_len = corpus, seq_len
        self.tokens, self.record = corpus.tokens, corpus.record
        self.fingerprint, self.content_sample = corpus.fingerprint, corpus.content_sample

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start, across windows and padding."""
        return self._corpus.gather(starts, count) & ID_MASK

    def gather_windows(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids [N, T + 1] and labels [N, T] of each window; int64.

        Where a label is ignored, it states whether the next token begins a document.
        """
        size = self.packed_seq_len + 1
        entries = self._corpus.gather(windows * size, size)
        ids, after = entries & ID_MASK, entries[:, 1:]
        ignored = np.where(after & BEGINS, DOCUMENT_END, SAME_DOCUMENT)
        return ids, np.where(after & UNTRAINED, ignored, ids[:, 1:])


def open_packed(
    path: str | Path, checks: CorpusChecks, files: OpenFiles, pairs: bool = False
) -> PackedSource:
    """Open a folder of windows, with pairs of answers or without, or its URL; raises DataError."""
    corpus = open_shards(path, checks, files, packed=True)
    assert corpus.manifest is not None, "only its manifest says that a corpus is packed"
    if corpus.manifest.pairs != pairs:
        raise DataError(
            f"{path}: its windows have {'no ' if pairs else ''}pairs of answers.",
            fix='Pairs (kind = "pairs" in the recipe) are for python -m titanlite_post dpo only.',
        )
    seq_len = corpus.manifest.packed_seq_len
    if corpus.tokens % (seq_len + 1):
        raise DataError(
            f"{path}: its {corpus.tokens} entries are not whole windows of {seq_len + 1}.",
            fix="Prepare the text again.",
        )
    return PackedSource(corpus, seq_len)
