"""Token ids on disk, read by position: Megatron's .bin/.idx pairs, with an optional manifest.

A shard is NAME.bin (the ids, document after document) and NAME.idx:

    9 bytes   MMIDIDX and two zeros         8 bytes   version, 1
    1 byte    type of an id                 8 bytes   S, sequences
    8 bytes   D, documents + 1              S int32   length of each sequence, in ids
    S int64   its first byte in the .bin    D int64   first sequence of each document, then S

All numbers are little-endian. A corpus is one shard, or a folder of shards, ordered by name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from titanlite.data.manifest import (
    MANIFEST,
    CorpusManifest,
    check_listed_files,
    hash_sampled_blocks,
    is_shard_intact,
    read_corpus_manifest,
    shard_paths,
    wrong_size_error,
)
from titanlite.data.open_files import FileRequest, OpenFiles
from titanlite.data.token_source import CorpusChecks, SourceRecord, TokenSource
from titanlite.errors import DataError
from titanlite.log import pluralize

MAGIC = b"MMIDIDX\0\0"
INDEX_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
ID_TYPES = {code: np.dtype(name) for code, name in _CODES.items()}
_PREPARE = "titanlite prepare makes a folder that can be read."
_BUFFERED_IDS = 1 << 20


def id_code_of(vocab_size: int) -> int:
    # uint16, or int32: the format has no uint32, and every reader of it supports int32
    return 8 if vocab_size <= 1 << 16 else 4


def id_type_of(vocab_size: int) -> np.dtype:
    """The type that `ShardWriter` stores the ids of a vocabulary in."""
    return ID_TYPES[id_code_of(vocab_size)]


class Corpus(TokenSource):
    """The shards of a corpus, read as one sequence of `tokens` ids; DataError if it has none."""

    def __init__(
        self,
        path: str,
        shards: list[CorpusShard],
        manifest: CorpusManifest | None,
        files: OpenFiles,
    ):
        self.path, self.manifest, self._files = path, manifest, files
        self._shards = [shard for shard in shards if shard.tokens]
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        if not self._shards:
            raise DataError(f"{path}: contains no tokens.", fix=_PREPARE)
        self.tokens = int(self._ends[-1])
        files.expect(len(self._shards))
        self.fingerprint = self._hash_content(shards)
        samples = [shard.sample for shard in shards if shard.sample is not None]
        # unlike fingerprint the same with and without a manifest
        self.content_sample = (
            xxhash.xxh3_128_hexdigest(" ".join(samples).encode())
            if len(samples) == len(shards)
            else None
        )
        self.record = None
        if manifest:
            self.record = SourceRecord(
                manifest.tokenizer, manifest.vocab_size, manifest.max_id, manifest.bos
            )

    def shard_ranges(self) -> list[tuple[str, int, int]]:
        """(path of the .bin, ids of the corpus before it, bytes of an id) of each shard."""
        return [(shard.path, shard.begin, shard.type.itemsize) for shard in self._shards]

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [start, start + count), int64; raises DataError, or IndexError if outside."""
        return self.gather(np.array([start]), count)[0]

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [N, count]; raises DataError."""
        out = np.empty((len(starts), count), dtype=np.int64)
        numbers = self._ends.searchsorted(starts, side="right").tolist()
        rows = list(zip(out, starts.tolist(), numbers, strict=True))
        if self._files.reads_together:
            self._gather_parts(rows)
            return out
        # Faster: one buffer for all rows. _gather_parts reads, or refuses, the other rows.
        ids = np.empty(count, np.int64)
        content = ids.view(np.uint8).data
        for row, start, number in rows:
            shard = self._shards[number] if number < len(self._shards) else None
            if shard is None or start < 0 or start + count > shard.begin + shard.tokens:
                self._gather_parts([(row, start, number)])
                continue
            if ids.dtype is not shard.type:
                ids = np.empty(count, shard.type)
                content = ids.view(np.uint8).data
            offset = (start - shard.begin) * shard.type.itemsize
            self._files.read(shard.path, shard.bytes, offset, content)
            row[:] = ids
        return out

    def _gather_parts(self, rows: Sequence[tuple[np.ndarray, int, int]]) -> None:
        """Fill each (row, start, number of its first shard) from start on; raises IndexError."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []  # of a row, and its ids as they are stored
        requests: list[FileRequest] = []
        for row, start, number in rows:
            if start < 0 or start + row.size > self.tokens:
                raise IndexError(f"ids {start}…{start + row.size} of {self.tokens} in {self.path}")
            done = 0
            while done < row.size:
                shard = self._shards[number]
                first = start + done - shard.begin
                ids = np.empty(min(row.size - done, shard.tokens - first), shard.type)
                requests.append(_request(shard, first, ids))
                parts.append((row[done : done + ids.size], ids))
                done, number = done + ids.size, number + 1
        self._files.read_all(requests)
        for target, ids in parts:
            target[:] = ids

    def _hash_content(self, shards: Sequence[CorpusShard]) -> str:
        """Hash of the recorded hashes; without a manifest, of types, sizes and ids at both ends."""
        digest = xxhash.xxh3_128()
        for shard in shards:
            digest.update(f"{shard.type.str} {shard.tokens} ".encode())
            if self.manifest is None:  # reading all of a large corpus could take an hour
                ids = np.empty(min(shard.tokens, _BUFFERED_IDS), shard.type)
                for first in (0, shard.tokens - ids.size):
                    self._files.read_all([_request(shard, first, ids)])
                    digest.update(ids.data)
        for entry in self.manifest.shards if self.manifest else ():
            digest.update(entry.bin_hash.encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class CorpusShard:
    """One shard of a corpus."""

    path: str  # of the .bin
    type: np.dtype  # of an id
    begin: int  # ids of the corpus before this shard
    tokens: int
    bytes: int
    sample: str | None  # hash_sampled_blocks() of the .bin; None if not sampled


def _request(shard: CorpusShard, first: int, ids: np.ndarray) -> FileRequest:
    """Fill `ids` from id number `first` of a shard on."""
    return shard.path, shard.bytes, first * shard.type.itemsize, ids.view(np.uint8).data


def open_corpus(
    path: str | Path,
    checks: CorpusChecks | None = None,
    files: OpenFiles | None = None,
    *,
    packed: bool | None = False,
) -> Corpus:
    """Open a folder of shards, or one shard given by its prefix or either file; raises DataError.

    Names and sizes are checked, against the manifest if there is one; then what `checks` requests.
    `packed`: whether the shards must have packed windows (titanlite/data/packed.py) or must not;
    None: either.
    """
    location, checks = Path(path), checks or CorpusChecks()
    try:
        pairs = _list_shard_files(location)
        manifest = _read_and_compare_manifest(location, pairs)
        check_packing(location, manifest, packed)
        sampled = checks.verify != "off"
        samples = {bin: hash_sampled_blocks(bin) for bin, _ in pairs} if sampled else {}
        shards: list[CorpusShard] = []
        for bin, idx in pairs:
            begin = shards[-1].begin + shards[-1].tokens if shards else 0
            shards.append(_open_shard(bin, idx, begin, samples.get(bin)))
        _check_content(location, manifest, samples, checks)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or path}: cannot be read ({reason}).") from None
    return Corpus(str(path), shards, manifest, files or OpenFiles())


def _read_and_compare_manifest(
    location: Path, pairs: list[tuple[Path, Path]]
) -> CorpusManifest | None:
    """Read a folder's manifest and compare names and sizes with it; None if there is none."""
    if not location.is_dir():
        return None
    manifest = read_corpus_manifest(location / MANIFEST)
    if manifest:
        check_listed_files(location, pairs, manifest)
    return manifest


def check_packing(
    location: str | Path, manifest: CorpusManifest | None, packed: bool | None
) -> None:
    """Refuse packed windows as documents, and documents as windows; raises DataError."""
    seq_len = manifest.packed_seq_len if manifest else 0
    if seq_len and packed is False:
        raise DataError(
            f"{location}: its documents are packed in windows of {seq_len} tokens.",
            fix='Set format = "packed" for this source.',
        )
    if packed and not seq_len:
        raise DataError(
            f"{location}: its documents are not packed.",
            fix='Set format = "megatron" for this source, or prepare it with [pack] mode ='
            ' "best_fit".',
        )


def _check_content(
    location: Path, manifest: CorpusManifest | None, samples: dict[Path, str], checks: CorpusChecks
) -> None:
    """Compare the bytes on the disk with the hashes in the manifest; raises DataError."""
    if checks.verify == "full" and manifest is None:
        raise DataError(
            f'{location}: has no {MANIFEST}, so data.verify = "full" has nothing to compare it'
            " with.",
            fix='Use data.verify = "sample", or make the corpus with titanlite prepare.',
        )
    if checks.verify == "full":
        verify_corpus(location, checks.verify_slice)
    for shard in manifest.shards if manifest else ():
        bin, _ = shard_paths(location / shard.name)
        if bin in samples and samples[bin] != shard.bin_sample:
            raise damaged_error(bin)


def damaged_error(file: Path | str) -> DataError:
    return DataError(
        f"{file}: its bytes differ from those that were written: the file was damaged or replaced.",
        fix="Restore the folder from a copy, or remove it and prepare the text again.",
    )


def verify_corpus(
    path: str | Path,
    verify_slice: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CorpusManifest:
    """Compare every byte of a folder of shards with its manifest; raises DataError.

    `verify_slice`: (rank, ranks), only shards [rank::ranks]. `progress` gets bytes done, in total.
    """
    folder = Path(path)
    manifest = read_corpus_manifest(folder / MANIFEST)
    if manifest is None:
        raise DataError(
            f"{path}: has no {MANIFEST}, so there is nothing to compare it with.", fix=_PREPARE
        )
    check_listed_files(folder, _list_shard_files(folder), manifest)
    rank, ranks = verify_slice
    shards = manifest.shards[rank::ranks]
    done, total = 0, sum(shard.bin_bytes + shard.idx_bytes for shard in shards)
    for shard in shards:
        progress(done, total)
        if not is_shard_intact(folder, shard):
            raise damaged_error(folder / shard.name)
        done += shard.bin_bytes + shard.idx_bytes
    progress(total, total)
    return manifest


def _list_shard_files(location: Path) -> list[tuple[Path, Path]]:
    """The .bin and .idx of each shard, in the order of their names; raises DataError."""
    if location.is_dir():
        files = [file for ending in ("*.bin", "*.idx") for file in location.glob(ending)]
        prefixes = sorted({file.with_suffix("") for file in files}, key=lambda prefix: prefix.name)
    else:
        is_file = location.suffix in (".bin", ".idx")
        prefixes = [location.with_suffix("") if is_file else location]
    if not prefixes:
        inside = [location / side for side in ("train", "validation") if (location / side).is_dir()]
        fix = f'Did you mean "{inside[0]}"?' if inside else _PREPARE
        raise DataError(f"{location}: has no .bin and .idx files.", fix=fix)
    pairs = [shard_paths(prefix) for prefix in prefixes]
    missing = [file for pair in pairs for file in pair if not file.is_file()]
    if len(missing) == 2 * len(pairs):
        raise DataError(f"{location}: no such folder or shard.", fix=_PREPARE)
    if missing:
        names = ", ".join(file.name for file in missing[:4])
        raise DataError(
            f"{location}: {len(missing)} of {2 * len(pairs)} files are missing: {names}.",
            fix="A shard is a .bin and an .idx of the same name; copy both. A .bin that never had"
            " an .idx, such as nanoGPT's or llm.c's, cannot be read: prepare its text with"
            " titanlite prepare.",
        )
    return pairs


def _open_shard(bin: Path, idx: Path, begin: int, sample: str | None) -> CorpusShard:
    """Read the index of a shard and check the sizes of both files; raises DataError."""
    size = idx.stat().st_size
    with open(idx, "rb") as file:
        ids_type, sequences = parse_header(idx, size, file.read(INDEX_HEADER.size))
        end = _end_of_last_sequence(file, sequences, ids_type.itemsize)
    if bin.stat().st_size != end:
        raise wrong_size_error(bin, bin.stat().st_size, end, idx.name)
    return CorpusShard(str(bin), ids_type, begin, end // ids_type.itemsize, end, sample)


def parse_header(idx: Path | str, size: int, header: bytes) -> tuple[np.dtype, int]:
    """(type of an id, number of sequences) of an index of `size` bytes; raises DataError."""
    if len(header) < INDEX_HEADER.size or not header.startswith(MAGIC):
        raise DataError(f"{idx}: is not a Megatron index ({size} bytes).", fix=_PREPARE)
    _, version, code, sequences, entries = INDEX_HEADER.unpack(header)
    if version != 1 or code not in _CODES:
        raise DataError(
            f"{idx}: has version {version} and type {code}; supported are version 1 and"
            f" the integer types {', '.join(map(str, _CODES))}.",
            fix=_PREPARE,
        )
    expected = INDEX_HEADER.size + 12 * sequences + 8 * entries
    if sequences and size == expected + sequences:
        raise DataError(
            f"{idx}: is a multimodal Megatron index: {sequences:,} bytes with the mode of each"
            " sequence follow its list of documents. Only text can be trained on.",
            fix=_PREPARE,
        )
    if size != expected:
        raise wrong_size_error(idx, size, expected, f"its {pluralize(sequences, 'sequence')}")
    return ID_TYPES[code], sequences


def _end_of_last_sequence(file: IO[bytes], sequences: int, id_bytes: int) -> int:
    """Byte offset in the .bin at which the last sequence ends, from the open index."""
    if sequences == 0:
        return 0
    file.seek(INDEX_HEADER.size + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(INDEX_HEADER.size + 12 * sequences - 8)
    (start,) = struct.unpack("<q", file.read(8))
    return start + length * id_bytes
