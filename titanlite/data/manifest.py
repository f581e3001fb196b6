"""The manifest of a folder of shards: sizes and hashes of its files, checked on opening the folder.

The manifest is written last, so a folder with a manifest is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import xxhash

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

MANIFEST = "manifest.json"

_CHUNK_BYTES = 1 << 24
_SAMPLED_BLOCKS, _BLOCK_BYTES = 8, 4096  # of each file: few enough for a slow shared disk


@dataclass(frozen=True)
class ShardRecord:
    """The entry of one shard in a manifest."""

    name: str
    documents: int
    tokens: int
    max_id: int  # -1 if the shard has no tokens
    bin_bytes: int
    idx_bytes: int
    bin_hash: str  # xxh3_128
    idx_hash: str
    bin_sample: str  # hash_sampled_blocks() of the .bin


@dataclass(frozen=True)
class CorpusManifest:
    """The content of a manifest: how the shards were made, and what each file must be."""

    tokenizer: str  # its fingerprint
    vocab_size: int
    max_id: int
    documents: int
    tokens: int
    shards: list[ShardRecord]
    format: int = 1
    bos: bool = False  # every document begins with the tokenizer's BOS
    packed_seq_len: int = 0  # of the windows that the documents are packed in; 0: not packed
    pairs: bool = False  # documents 2k and 2k + 1 of a window: a chosen and a rejected answer


def read_corpus_manifest(path: Path) -> CorpusManifest | None:
    """Read a manifest; None if the file does not exist. Raises DataError if it is not valid."""
    try:
        content = read_regular_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _not_valid_error(path, error) from None
    return parse_corpus_manifest(content, path)


def parse_corpus_manifest(content: bytes, path: Path | str) -> CorpusManifest:
    """The manifest that a file contains; `path` is for messages. Raises DataError."""
    try:
        table = parse_json(content)
        entries = table.pop("shards")
        if type(entries) is not list:
            raise TypeError(f"shards is {entries!r:.40}")
        shards = [ShardRecord(**entry) for entry in entries]
        manifest = CorpusManifest(**table, shards=shards)
        _check_field_types(manifest)
        for shard in shards:
            _check_field_types(shard)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _not_valid_error(path, error) from None
    if manifest.format != CorpusManifest.format:
        raise DataError(f"{path}: has format {manifest.format}; only format 1 is supported.")
    return manifest


def _not_valid_error(path: Path | str, error: Exception) -> DataError:
    return DataError(f"{path}: is not a valid manifest ({error}).", fix="Prepare the text again.")


def _check_field_types(record: CorpusManifest | ShardRecord) -> None:
    """Raise TypeError where JSON gave a field another type; the file may be foreign."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name != "shards" and type(value).__name__ != field.type:
            raise TypeError(f"{field.name} is {value!r:.40}")


def check_listed_files(
    folder: Path, pairs: Iterable[tuple[Path, Path]], manifest: CorpusManifest
) -> None:
    """Raise DataError unless `pairs` are exactly the files of the manifest, with their sizes."""
    present = {file.name: file.stat().st_size for pair in pairs for file in pair}
    compare_listing(folder, present, manifest)


def compare_listing(
    folder: Path | str, present: Mapping[str, int], manifest: CorpusManifest
) -> None:
    """Raise DataError unless `present`, bytes by name, are exactly the files of the manifest."""
    listed = {f"{shard.name}.bin": shard.bin_bytes for shard in manifest.shards}
    listed |= {f"{shard.name}.idx": shard.idx_bytes for shard in manifest.shards}
    if missing := sorted(listed.keys() - present.keys()):
        raise DataError(
            f"{folder}: {len(missing)} of {len(listed)} files are missing:"
            f" {', '.join(missing[:4])}.",
            fix="Copy the complete folder.",
        )
    if unlisted := sorted(present.keys() - listed.keys()):
        raise DataError(
            f"{folder}: {', '.join(unlisted[:4])} are not in its {MANIFEST}.",
            fix=f"Move them to another folder, or remove {MANIFEST} to read all files.",
        )
    for name, size in listed.items():
        if present[name] != size:
            raise wrong_size_error(f"{folder}/{name}", present[name], size, MANIFEST)


def wrong_size_error(file: Path | str, size: int, expected: int, according_to: str) -> DataError:
    """The error for a file that has not the size that its index or manifest gives."""
    how = "is truncated" if size < expected else "is too long"
    return DataError(
        f"{file}: {how}: {size} bytes, but {expected} according to {according_to}.",
        fix="Copy it again, or prepare the text again.",
    )


def is_shard_intact(folder: Path, shard: ShardRecord) -> bool:
    """Whether both files of a shard exist and have the recorded hashes; reads every byte."""
    bin, idx = shard_paths(folder / shard.name)
    try:
        return hash_file(bin) == shard.bin_hash and hash_file(idx) == shard.idx_hash
    except OSError:
        return False


def hash_sampled_blocks(path: Path) -> str:
    """Hash of a file's size and of eight of its blocks; raises OSError.

    The positions of the blocks depend on the size only, and are distributed over the file. This
    detects another content of the same size; only `is_shard_intact` detects a few changed bytes.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb", buffering=0) as file:
        for offset, count in sampled_blocks(size):
            digest.update(os.pread(file.fileno(), count, offset))
    return digest.hexdigest()


def sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each block that is sampled; a small file is one block."""
    if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
        yield 0, size
        return
    for number in range(_SAMPLED_BLOCKS):
        first, end = (size * n // _SAMPLED_BLOCKS for n in (number, number + 1))
        offsets = end - first - _BLOCK_BYTES + 1
        yield first + xxhash.xxh3_64_intdigest(f"{size} {number}".encode()) % offsets, _BLOCK_BYTES


def hash_file(path: Path) -> str:
    """xxh3_128 of the content of a file; raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def shard_paths(prefix: Path) -> tuple[Path, Path]:
    """The .bin and the .idx of a shard."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
