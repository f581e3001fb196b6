"""What a folder of shards must hold: written last, and compared whenever the folder is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO

import xxhash

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

MANIFEST = "manifest.json"

_CHUNK_BYTES = 1 << 24
_SAMPLE_BLOCKS, _SAMPLE_BYTES = 8, 4096  # of each file: few enough for a slow shared disk


@dataclass(frozen=True)
class ShardRecord:
    """What a manifest says of a shard."""

    name: str
    documents: int
    tokens: int
    max_id: int  # -1 where there are no tokens
    bin_bytes: int
    idx_bytes: int
    bin_hash: str  # xxh3_128
    idx_hash: str
    bin_sample: str = ""  # sample_of() the .bin; "" in manifests of older versions


@dataclass(frozen=True)
class CorpusManifest:
    """What a folder of shards holds, and the proof that it is whole."""

    tokenizer: str  # its fingerprint
    vocab_size: int
    max_id: int
    documents: int
    tokens: int
    shards: list[ShardRecord]
    format: int = 1
    bos: bool = False  # every document begins with the tokenizer's BOS


def write_corpus_manifest(
    folder: str | Path,
    tokenizer: str,
    vocab_size: int,
    shards: Sequence[ShardRecord],
    *,
    bos: bool = False,
) -> CorpusManifest:
    """Declare a folder of shards whole; to be called last."""
    manifest = CorpusManifest(
        tokenizer,
        vocab_size,
        max_id=max((shard.max_id for shard in shards), default=-1),
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=sorted(shards, key=lambda shard: shard.name),
        bos=bos,
    )
    text = json.dumps(asdict(manifest), indent=1) + "\n"
    write_whole(Path(folder) / MANIFEST, text.encode())
    return manifest


def read_corpus_manifest(path: Path) -> CorpusManifest | None:
    """The manifest there, or None where there is none; raises DataError."""
    try:
        table = parse_json(read_regular_file(path))
        listed = table.pop("shards")
        if type(listed) is not list:
            raise TypeError(f"shards is {listed!r:.40}")
        shards = [ShardRecord(**record) for record in listed]
        manifest = CorpusManifest(**table, shards=shards)
        for record in (manifest, *shards):
            _check_types(record)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise DataError(
            f"{path}: cannot be understood ({error}).", fix="Prepare the text again."
        ) from None
    if manifest.format != CorpusManifest.format:
        raise DataError(f"{path}: is of format {manifest.format}; only 1 is known here.")
    return manifest


def _check_types(record: CorpusManifest | ShardRecord) -> None:
    """Raise TypeError unless the numbers are numbers and the texts are texts: it may be foreign."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name != "shards" and type(value).__name__ != field.type:
            raise TypeError(f"{field.name} is {value!r:.40}")


def compare(folder: Path, pairs: Iterable[tuple[Path, Path]], manifest: CorpusManifest) -> None:
    """Refuse a folder that has not just the files of its manifest, each with its size."""
    there = {file.name: file.stat().st_size for pair in pairs for file in pair}
    said = {f"{shard.name}.bin": shard.bin_bytes for shard in manifest.shards}
    said |= {f"{shard.name}.idx": shard.idx_bytes for shard in manifest.shards}
    if missing := sorted(said.keys() - there.keys()):
        raise DataError(
            f"{folder}: {len(missing)} of {len(said)} files are missing: {', '.join(missing[:4])}.",
            fix="Copy the whole folder.",
        )
    if strange := sorted(there.keys() - said.keys()):
        raise DataError(
            f"{folder}: {', '.join(strange[:4])} are not in its {MANIFEST}.",
            fix=f"Move them to another folder, or remove {MANIFEST} to read all that is there.",
        )
    for name, size in said.items():
        if there[name] != size:
            raise size_differs(folder / name, there[name], size, MANIFEST)


def size_differs(file: Path, size: int, whole: int, by: str) -> DataError:
    """The error for a file of another size than `by` says."""
    how = "is cut short" if size < whole else "is too long"
    return DataError(
        f"{file}: {how}: {size} bytes, {whole} by {by}.",
        fix="Copy it again, or prepare the text again.",
    )


def is_intact(folder: Path, shard: ShardRecord) -> bool:
    """Whether both files of a shard are there and are what the record says."""
    hashes = (shard.bin_hash, shard.idx_hash)
    try:
        return all(_hash_of(f) == said for f, said in zip(pair_of(folder / shard.name), hashes))
    except OSError:
        return False


def sample_of(path: Path) -> str:
    """A hash of the size of a file and of eight blocks of it; raises OSError.

    The blocks are spread over the file at places that depend on its size only. Other content of
    the same size differs in nearly every block, so it is found; a few changed bytes are found by
    `is_intact` only.
    """
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb", buffering=0) as file:
        for offset, count in _sampled_blocks(size):
            digest.update(os.pread(file.fileno(), count, offset))
    return digest.hexdigest()


def _sampled_blocks(size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what is sampled of a file; all of a small one."""
    if size <= _SAMPLE_BLOCKS * _SAMPLE_BYTES:
        yield 0, size
        return
    for number in range(_SAMPLE_BLOCKS):
        first, end = (size * n // _SAMPLE_BLOCKS for n in (number, number + 1))
        places = end - first - _SAMPLE_BYTES + 1
        yield first + xxhash.xxh3_64_intdigest(f"{size} {number}".encode()) % places, _SAMPLE_BYTES


def _hash_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def pair_of(prefix: Path) -> tuple[Path, Path]:
    """The two files of a shard."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def write_whole(path: str | Path, content: bytes) -> None:
    """All of the content at `path`, or nothing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        with open(draft, "wb") as file:
            file.write(content)
            to_disk(file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Where this process writes what will be renamed to `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def to_disk(file: IO[bytes]) -> None:
    """Let the disk have it before anyone is told that it is there."""
    file.flush()
    os.fsync(file.fileno())
