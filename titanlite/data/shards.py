"""Token ids on disk, read by position: Megatron's .bin/.idx pairs, and a manifest of our own.

A shard is NAME.bin (the ids, document after document) and NAME.idx:

    9 bytes   MMIDIDX and two zeros         8 bytes   version, 1
    1 byte    type of an id                 8 bytes   S, sequences
    8 bytes   D, length of the last array   S int32   ids of each sequence
    S int64   its first byte in the .bin    D int64   first sequence of each document

all little-endian. A corpus is one shard, or a folder of them in the order of their names.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from titanlite.data.links import refuse_outward_links
from titanlite.data.manifest import (
    MANIFEST,
    CorpusManifest,
    ShardRecord,
    compare,
    draft_of,
    is_intact,
    pair_of,
    read_corpus_manifest,
    sample_of,
    size_differs,
    to_disk,
    write_whole,
)
from titanlite.data.open_files import OpenFiles
from titanlite.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
_TYPES = {code: np.dtype(name) for code, name in _CODES.items()}
_PREPARE = "scripts/prepare_data.py makes a folder that can be read."
_BUFFERED_IDS = 1 << 20


# --- writing -------------------------------------------------------------------------------------


class ShardWriter:
    """Writes one shard, a document at a time; nothing is there under its name until `close`."""

    def __init__(self, prefix: str | Path, vocab_size: int):
        self.bin, self.idx = pair_of(Path(prefix))
        self.vocab_size = vocab_size
        # the format has no uint32; every reader of it opens int32
        self._code = 8 if vocab_size <= 1 << 16 else 4
        self._type = np.dtype(_CODES[self._code])
        self._lengths: list[int] = []
        self._waiting: list[np.ndarray] = []
        self._waiting_ids, self._max_id = 0, -1
        self._hash = xxhash.xxh3_128()
        self.bin.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(draft_of(self.bin), "wb")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_) -> None:
        """Forget what was not closed."""
        self._file.close()
        for path in (self.bin, self.idx):
            draft_of(path).unlink(missing_ok=True)

    def add(self, document: Sequence[int] | np.ndarray) -> None:
        """One document; raises DataError for an id outside the vocabulary."""
        ids = np.asarray(document, dtype=np.int64)
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.vocab_size:
                raise DataError(
                    f"{self.bin}: document {len(self._lengths)} has the id"
                    f" {low if low < 0 else high}, outside 0…{self.vocab_size - 1}."
                )
            self._max_id = max(self._max_id, high)
        self._lengths.append(ids.size)
        self._waiting.append(ids.astype(self._type))
        self._waiting_ids += ids.size
        if self._waiting_ids >= _BUFFERED_IDS:
            self._flush()

    def _flush(self) -> None:
        content = b"".join(ids.tobytes() for ids in self._waiting)
        self._file.write(content)
        self._hash.update(content)
        self._waiting, self._waiting_ids = [], 0

    def close(self) -> ShardRecord:
        """Put the pair where it belongs."""
        self._flush()
        to_disk(self._file)
        self._file.close()
        index = self._index()
        write_whole(self.idx, index)
        os.replace(draft_of(self.bin), self.bin)
        return ShardRecord(
            self.bin.stem,
            documents=len(self._lengths),
            tokens=sum(self._lengths),
            max_id=self._max_id,
            bin_bytes=self.bin.stat().st_size,
            idx_bytes=len(index),
            bin_hash=self._hash.hexdigest(),
            idx_hash=xxhash.xxh3_128_hexdigest(index),
            bin_sample=sample_of(self.bin),
        )

    def _index(self) -> bytes:
        lengths = np.array(self._lengths, dtype="<i4")
        starts = (np.cumsum(lengths, dtype="<i8") - lengths) * self._type.itemsize
        documents = np.arange(len(lengths) + 1, dtype="<i8")  # every document is one sequence
        header = _HEADER.pack(_MAGIC, 1, self._code, len(lengths), len(documents))
        return header + lengths.tobytes() + starts.tobytes() + documents.tobytes()


# --- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusChecks:
    """What is compared when a corpus is opened, beyond names and sizes."""

    verify: Literal["sample", "full", "off"] = "sample"
    # blocks of every shard; all bytes, which needs a manifest; nothing
    follow_symlinks: bool = False  # read files that links lead to outside the folder
    part: tuple[int, int] = (0, 1)  # (n, of): "full" reads every `of`-th shard, the n-th first


class Corpus:
    """A row of shards, read as one row of `tokens` ids."""

    def __init__(
        self, path: str, shards: list[_Shard], manifest: CorpusManifest | None, files: OpenFiles
    ):
        self.path, self.manifest, self._files = path, manifest, files
        self.documents = sum(shard.documents for shard in shards)
        self._shards = [shard for shard in shards if shard.tokens]
        self._ends = np.cumsum([shard.tokens for shard in self._shards], dtype=np.int64)
        self.tokens = int(self._ends[-1]) if self._shards else 0
        files.expect(len(self._shards))
        self.fingerprint = self._hash_content(shards)
        samples = [shard.sample for shard in shards]  # of what lies on the disk, whoever wrote it
        self.sample = (
            None if None in samples else xxhash.xxh3_128_hexdigest(" ".join(samples).encode())
        )

    def read(self, start: int, count: int) -> np.ndarray:
        """Ids [start, start + count), int64; raises DataError."""
        out = np.empty(count, dtype=np.int64)
        self._copy(start, out)
        return out

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [starts, count]; raises DataError."""
        out = np.empty((len(starts), count), dtype=np.int64)
        shards = self._ends.searchsorted(starts, side="right").tolist()
        ids = _Ids(count, np.dtype(np.int64))
        for row, start, number in zip(out, starts.tolist(), shards):
            shard = self._shards[number] if number < len(self._shards) else None
            if shard is None or start < 0 or start + count > shard.begin + shard.tokens:
                self._copy(start, row)
                continue
            if ids.type is not shard.type:
                ids = _Ids(count, shard.type)
            row[:] = self._read(shard, start - shard.begin, ids)
        return out

    def _copy(self, start: int, out: np.ndarray) -> None:
        """Fill `out`, over as many shards as that takes."""
        if start < 0 or start + out.size > self.tokens:
            raise IndexError(f"ids {start}…{start + out.size} of {self.tokens} in {self.path}")
        number, done = int(self._ends.searchsorted(start, side="right")), 0
        while done < out.size:
            shard = self._shards[number]
            first = start + done - shard.begin
            count = min(out.size - done, shard.tokens - first)
            out[done : done + count] = self._read(shard, first, _Ids(count, shard.type))
            done, number = done + count, number + 1

    def _read(self, shard: _Shard, first: int, ids: _Ids) -> np.ndarray:
        """Fill `ids` from a shard, from its id number `first` on."""
        self._files.read(shard.path, shard.bytes, first * shard.type.itemsize, ids.content)
        return ids.array

    def _hash_content(self, shards: Sequence[_Shard]) -> str:
        """Equal for equal ids: by recorded hashes, or without a manifest by sizes and samples."""
        digest = xxhash.xxh3_128()
        for shard in shards:
            digest.update(f"{shard.type.str} {shard.tokens} ".encode())
            if self.manifest is None:  # reading all of a foreign corpus could take an hour
                some = _Ids(min(shard.tokens, _BUFFERED_IDS), shard.type)
                digest.update(self._read(shard, 0, some))
                digest.update(self._read(shard, shard.tokens - some.array.size, some))
        for record in self.manifest.shards if self.manifest else ():
            digest.update(record.bin_hash.encode())
        return digest.hexdigest()


class _Ids:
    """Room for ids as they lie in a shard."""

    def __init__(self, count: int, type: np.dtype):
        self.type, self.array = type, np.empty(count, type)
        self.content = memoryview(self.array.view(np.uint8))


@dataclass(frozen=True)
class _Shard:
    path: str  # of the .bin
    type: np.dtype  # of an id
    begin: int  # ids of the corpus before it
    tokens: int
    bytes: int
    documents: int
    sample: str | None  # None where nothing was sampled


def open_corpus(
    path: str | Path, checks: CorpusChecks | None = None, files: OpenFiles | None = None
) -> Corpus:
    """The corpus in a folder, or of one shard named by its prefix or either file; raises DataError.

    Names and sizes are checked, against the manifest where there is one, then what `checks` says.
    """
    place, checks = Path(path), checks or CorpusChecks()
    try:
        pairs = _pairs(place)
        manifest = _read_manifest_beside(place, pairs, checks)
        samples = {bin: sample_of(bin) for bin, _ in pairs} if checks.verify != "off" else {}
        shards: list[_Shard] = []
        for bin, idx in pairs:
            begin = shards[-1].begin + shards[-1].tokens if shards else 0
            shards.append(_open_shard(bin, idx, begin, samples.get(bin)))
        _check_content(place, manifest, samples, checks)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or path}: cannot be read ({reason}).") from None
    corpus = Corpus(str(path), shards, manifest, files or OpenFiles())
    if corpus.tokens == 0:
        raise DataError(f"{path}: holds no tokens.", fix=_PREPARE)
    return corpus


def _read_manifest_beside(
    place: Path, pairs: list[tuple[Path, Path]], checks: CorpusChecks
) -> CorpusManifest | None:
    """The manifest of a folder whose files are those that it names; None where there is none."""
    if not place.is_dir():
        return None
    if not checks.follow_symlinks:
        files = [place / MANIFEST, *(file for pair in pairs for file in pair)]
        refuse_outward_links(files, place, "data.follow_symlinks = true")
    manifest = read_corpus_manifest(place / MANIFEST)
    if manifest:
        compare(place, pairs, manifest)
    return manifest


def _check_content(
    place: Path, manifest: CorpusManifest | None, samples: dict[Path, str], checks: CorpusChecks
) -> None:
    """Compare what lies on the disk with what the manifest recorded of it; raises DataError."""
    if checks.verify == "full" and manifest is None:
        raise DataError(
            f'{place}: has no {MANIFEST}, so data.verify = "full" has nothing to compare it with.',
            fix='Use data.verify = "sample", or make the corpus by scripts/prepare_data.py.',
        )
    if checks.verify == "full":
        verify_corpus(place, part=checks.part)
    for shard in manifest.shards if manifest else ():
        bin, _ = pair_of(place / shard.name)
        if shard.bin_sample and bin in samples and samples[bin] != shard.bin_sample:
            raise _content_differs(bin)


def _content_differs(file: Path) -> DataError:
    return DataError(
        f"{file}: its bytes are not those that were written: the file was damaged or replaced.",
        fix="Copy the folder again, or remove it and prepare the text again. scripts/prepare_data.py"
        " --verify FOLDER reads every byte.",
    )


def verify_corpus(
    path: str | Path,
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> CorpusManifest:
    """Read every byte of a folder of ours and compare it with its manifest; raises DataError.

    `part` = (n, of): every `of`-th shard, the n-th first. `progress` gets bytes done, and in all.
    """
    folder = Path(path)
    manifest = read_corpus_manifest(folder / MANIFEST)
    if manifest is None:
        raise DataError(
            f"{path}: has no {MANIFEST}, so there is nothing to compare it with.", fix=_PREPARE
        )
    compare(folder, _pairs(folder), manifest)
    first, every = part
    shards = manifest.shards[first::every]
    done, of = 0, sum(shard.bin_bytes + shard.idx_bytes for shard in shards)
    for shard in shards:
        progress(done, of)
        if not is_intact(folder, shard):
            raise _content_differs(folder / shard.name)
        done += shard.bin_bytes + shard.idx_bytes
    progress(of, of)
    return manifest


def _pairs(place: Path) -> list[tuple[Path, Path]]:
    if place.is_dir():
        found = {file.with_suffix("") for end in ("*.bin", "*.idx") for file in place.glob(end)}
        prefixes = sorted(found, key=lambda prefix: prefix.name)
    else:
        prefixes = [place.with_suffix("") if place.suffix in (".bin", ".idx") else place]
    if not prefixes:
        inside = [place / side for side in ("train", "validation") if (place / side).is_dir()]
        fix = f'Did you mean "{inside[0]}"?' if inside else _PREPARE
        raise DataError(f"{place}: has no .bin and .idx files.", fix=fix)
    pairs = [pair_of(prefix) for prefix in prefixes]
    missing = [file for pair in pairs for file in pair if not file.is_file()]
    if len(missing) == 2 * len(pairs):
        raise DataError(f"{place}: there is no such folder or shard.", fix=_PREPARE)
    if missing:
        names = ", ".join(file.name for file in missing[:4])
        raise DataError(
            f"{place}: {len(missing)} of {2 * len(pairs)} files are missing: {names}.",
            fix="A shard is a .bin and an .idx of the same name; copy both.",
        )
    return pairs


def _open_shard(bin: Path, idx: Path, begin: int, sample: str | None) -> _Shard:
    size = idx.stat().st_size
    with open(idx, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError(f"{idx}: is not a Megatron index ({size} bytes).", fix=_PREPARE)
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise DataError(
                f"{idx}: version {version}, type {code}; only version 1 and integers"
                f" ({', '.join(map(str, _CODES))}) can be read.",
                fix=_PREPARE,
            )
        whole = _HEADER.size + 12 * sequences + 8 * entries
        if size not in (whole, whole + sequences):  # a byte a sequence more: Megatron's modes
            raise size_differs(idx, size, whole, f"its {sequences} sequences")
        ids_type = _TYPES[code]
        end = _end_of_last(file, sequences, ids_type.itemsize)
        documents = _documents(file, sequences, entries)
    if bin.stat().st_size != end:
        raise size_differs(bin, bin.stat().st_size, end, idx.name)
    tokens = end // ids_type.itemsize
    return _Shard(str(bin), ids_type, begin, tokens, end, documents, sample)


def _end_of_last(file, sequences: int, id_bytes: int) -> int:
    """Where the last sequence ends in the .bin."""
    if sequences == 0:
        return 0
    file.seek(_HEADER.size + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(_HEADER.size + 12 * sequences - 8)
    (start,) = struct.unpack("<q", file.read(8))
    return start + length * id_bytes


def _documents(file, sequences: int, entries: int) -> int:
    """How many documents there are; a sequence each where the list of them makes no sense."""
    if entries < 2:
        return sequences
    file.seek(_HEADER.size + 12 * sequences)
    (first,) = struct.unpack("<q", file.read(8))
    file.seek(_HEADER.size + 12 * sequences + 8 * (entries - 1))
    (last,) = struct.unpack("<q", file.read(8))
    return entries - 1 if (first, last) == (0, sequences) else sequences
