"""Write shards of token ids, packed windows among them, and the manifest of their folder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from titanlite.data.manifest import (
    MANIFEST,
    CorpusManifest,
    ShardRecord,
    hash_sampled_blocks,
    shard_paths,
)
from titanlite.data.shards import ID_TYPES, INDEX_HEADER, MAGIC, id_code_of, id_type_of
from titanlite.errors import DataError
from titanlite.files import write_file_atomically

_BUFFERED_IDS = 1 << 20


class ShardWriter:
    """Writes one shard, a document at a time; `close` gives the files their final names.

    `durable`: the files survive a power failure as soon as they have their names.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, durable: bool = True):
        self.bin, self.idx = shard_paths(Path(prefix))
        self._durable = durable
        self.vocab_size = vocab_size
        self._code = id_code_of(vocab_size)
        self._type = id_type_of(vocab_size)
        self._lengths: list[int] = []
        self._buffer: list[np.ndarray] = []
        self._buffered_ids, self._max_id = 0, -1
        self._hash = xxhash.xxh3_128()
        self.bin.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(_temporary_path(self.bin), "wb")  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_) -> None:
        """Remove the temporary files of a shard that was not closed."""
        self._file.close()
        for path in (self.bin, self.idx):
            _temporary_path(path).unlink(missing_ok=True)

    def add(self, document: Sequence[int] | np.ndarray) -> None:
        """Append one document; raises DataError for an id outside the vocabulary."""
        ids = document if isinstance(document, np.ndarray) else np.array(document, np.int64)
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"{self.bin}: document {len(self._lengths)} has the id"
                    f" {low if low < 0 else high}, outside 0…{self.vocab_size - 1}."
                )
            self._max_id = max(self._max_id, high)
        self._lengths.append(ids.size)
        self._buffer.append(ids.astype(self._type))
        self._buffered_ids += ids.size
        if self._buffered_ids >= _BUFFERED_IDS:
            self._flush()

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents whose ids follow each other; raises DataError as `add` does."""
        known = len(self._lengths)
        self.add(ids)
        self._lengths[known:] = lengths.tolist()

    def _flush(self) -> None:
        content = b"".join(ids.tobytes() for ids in self._buffer)
        self._file.write(content)
        self._hash.update(content)
        self._buffer, self._buffered_ids = [], 0

    def close(self) -> ShardRecord:
        """Write the index, then give the .bin its name: a shard whose .bin exists is complete."""
        self._flush()
        if self._durable:
            _flush_to_disk(self._file)
        self._file.close()
        index = self._build_index()
        if self._durable:
            write_file_atomically(self.idx, index)
        else:
            self.idx.write_bytes(index)
        os.replace(_temporary_path(self.bin), self.bin)
        return ShardRecord(
            self.bin.stem,
            documents=len(self._lengths),
            tokens=sum(self._lengths),
            max_id=self._max_id,
            bin_bytes=self.bin.stat().st_size,
            idx_bytes=len(index),
            bin_hash=self._hash.hexdigest(),
            idx_hash=xxhash.xxh3_128_hexdigest(index),
            bin_sample=hash_sampled_blocks(self.bin),
        )

    def _build_index(self) -> bytes:
        lengths = np.array(self._lengths, dtype="<i4")
        starts = (np.cumsum(lengths, dtype="<i8") - lengths) * self._type.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")  # every document is one sequence
        header = INDEX_HEADER.pack(MAGIC, 1, self._code, len(lengths), len(documents))
        return header + lengths.tobytes() + starts.tobytes() + documents.tobytes()


class EntryWriter(ShardWriter):
    """Writes a shard of entries: ids, possibly with BEGINS and UNTRAINED."""

    def __init__(self, prefix: str | Path):
        super().__init__(prefix, vocab_size=1 << 31)


def describe_shard(record: ShardRecord, documents: int, max_id: int) -> ShardRecord:
    """A shard's record with the documents packed in it and its largest id; `tokens` has padding."""
    return replace(record, documents=documents, max_id=max_id)


def write_corpus_manifest(
    folder: str | Path,
    tokenizer: str,
    vocab_size: int,
    shards: Sequence[ShardRecord],
    *,
    bos: bool = False,
    packed_seq_len: int = 0,
    pairs: bool = False,
) -> CorpusManifest:
    """Write the manifest of a folder whose shards are all complete."""
    manifest = CorpusManifest(
        tokenizer,
        vocab_size,
        max_id=max((shard.max_id for shard in shards), default=-1),
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=sorted(shards, key=lambda shard: shard.name),
        bos=bos,
        packed_seq_len=packed_seq_len,
        pairs=pairs,
    )
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    write_file_atomically(Path(folder) / MANIFEST, text.encode())
    return manifest


def read_document_lengths(idx: Path) -> tuple[np.ndarray, np.dtype]:
    """(length of each document, type of an id) of a shard that `ShardWriter` wrote."""
    content = idx.read_bytes()
    _, _, code, sequences, _ = INDEX_HEADER.unpack_from(content)
    return np.frombuffer(content, "<i4", sequences, INDEX_HEADER.size), ID_TYPES[code]


def _temporary_path(path: Path) -> Path:
    """Where this process writes a file before it is renamed to `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _flush_to_disk(file: IO[bytes]) -> None:
    """Write buffered bytes to the disk, so that a later rename cannot be durable before them."""
    file.flush()
    os.fsync(file.fileno())
