"""Shards by URL (`s3://…`), read in ranges through a cache on the local disk.

The folder must have a manifest: it gives the sizes of all files, and hashes of blocks of them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from titanlite.data.manifest import (
    MANIFEST,
    CorpusManifest,
    ShardRecord,
    compare_listing,
    parse_corpus_manifest,
    sampled_blocks,
)
from titanlite.data.open_files import BatchedFiles, FileRequest, OpenFiles
from titanlite.data.shards import (
    INDEX_HEADER,
    Corpus,
    CorpusShard,
    check_packing,
    damaged_error,
    open_corpus,
    parse_header,
)
from titanlite.data.token_source import CacheLimits, CorpusChecks
from titanlite.data.urls import is_data_url, open_file_system, remote_errors, version_of
from titanlite.errors import DataError
from titanlite.log import logger

_HASHED_BYTES = 1 << 24  # of one request, when whole files are verified
BLOCK_BYTES = 1 << 18
# A request for a sample (tens of KB) takes tens of ms; to transfer a whole block adds little.

_HASH_BYTES = 16
_LOCKS = 64  # that blocks share
_KEPT = 0.9  # of the limit, when blocks are removed

BlockName = tuple[str, int]  # key of a file, number of a block in it
FetchBlocks = Callable[[Sequence[BlockName]], Sequence[bytes]]


class RemoteVersion(NamedTuple):
    """Size and version of a file: they differ from those of an earlier file of this name."""

    bytes: int
    version: str


class RemoteFolder:
    """A folder on a file system of fsspec."""

    def __init__(self, url: str):
        self._url = url.rstrip("/")
        self.fs, path = open_file_system(self._url)
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def path_of(self, name: str) -> str:
        """The path of a file on the file system."""
        return f"{self._path}/{name}"

    def files(self) -> dict[str, RemoteVersion]:
        """The files as they are now, by name; empty if the folder does not exist."""
        self.fs.invalidate_cache(self._path)
        try:
            entries = self.fs.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        files = (entry for entry in entries if entry["type"] == "file")
        return {
            entry["name"].rpartition("/")[2]: RemoteVersion(entry["size"], version_of(entry))
            for entry in files
        }


class BlockCache:
    """Blocks of files by name, on a local disk, which all processes of a machine share.

    Each is a file with a hash of its content at the end. The least recently read ones are removed
    first. The processes take locks (flock) to fetch a block only once, and to keep the sum of all
    blocks below the limit.
    """

    def __init__(self, limits: CacheLimits):
        """Raises OSError if the folder cannot be made. A later error only leaves the cache out."""
        self._folder = limits.open_folder()
        self._limit = max(limits.bytes, BLOCK_BYTES + _HASH_BYTES)
        self._has_warned = False
        (self._folder / "blocks").mkdir(exist_ok=True)

    def read(self, names: Sequence[BlockName], fetch: FetchBlocks) -> dict[BlockName, bytes]:
        """The content of blocks; `fetch` returns those that are not here."""
        found = {name: content for name in names if (content := self._load(name)) is not None}
        missing = sorted(set(names) - found.keys())
        if not missing:
            return found
        with ExitStack() as stack:
            hashes = (xxhash.xxh3_64_intdigest(str(name).encode()) for name in missing)
            for number in sorted({digest % _LOCKS for digest in hashes}):
                stack.enter_context(self._locked(f"fetch-{number}"))  # in order: no deadlock
            for name in list(missing):
                if (content := self._load(name)) is not None:  # fetched by another process
                    found[name] = content
                    missing.remove(name)
            if missing:
                for name, content in zip(missing, fetch(missing), strict=True):
                    found[name] = content
                    self._store(name, content)
        return found

    def _path(self, name: BlockName) -> Path:
        return self._folder / "blocks" / f"{name[0]}-{name[1]}"

    def _load(self, name: BlockName) -> bytes | None:
        """A block, or None if it is not here, or damaged."""
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                stored = file.read()
                with suppress(OSError):
                    os.utime(file.fileno())  # now is the time of its last reading
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        content, digest = stored[:-_HASH_BYTES], stored[-_HASH_BYTES:]
        if xxhash.xxh3_128_digest(content) != digest:
            with suppress(OSError):
                path.unlink()
            return None
        return content

    def _warn(self, error: OSError) -> None:
        """Log the first failure of the cache; blocks are then fetched without it."""
        if not self._has_warned:
            logger.warning("%s: the cache cannot be used (%s)", self._folder, error.strerror)
        self._has_warned = True

    def _store(self, name: BlockName, content: bytes) -> None:
        """Write a block, and remove others first if there are too many."""
        size = len(content) + _HASH_BYTES
        with self._locked("size"), self._warned_errors():
            total = self._recorded_bytes() + size
            if total > self._limit:
                total = self._remove_oldest(self._limit * _KEPT - size) + size
            # recorded first: after a crash the record is too large, until blocks are removed again
            (self._folder / "bytes").write_text(str(total))
            path = self._path(name)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                temporary.write_bytes(content + xxhash.xxh3_128_digest(content))
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    @contextmanager
    def _warned_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(error)

    def _recorded_bytes(self) -> int:
        """The bytes of all blocks, as the process that wrote the last one recorded them."""
        try:
            return int((self._folder / "bytes").read_text())
        except (FileNotFoundError, ValueError):
            return self._limit  # so that they are counted

    def _remove_oldest(self, allowed: float) -> int:
        """Remove blocks until the others have at most `allowed` bytes; returns their bytes."""
        entries = []
        for entry in os.scandir(self._folder / "blocks"):
            with suppress(FileNotFoundError):
                status = entry.stat()
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= allowed:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock; nothing is held if the folder fails."""
        with ExitStack() as stack:
            with self._warned_errors():
                flags = os.O_CREAT | os.O_RDWR
                descriptor = os.open(self._folder / f"{name}.lock", flags, 0o600)
                stack.callback(os.close, descriptor)  # releases the lock
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield


class RemoteFiles(BatchedFiles):
    """Files of one remote folder, read by position in blocks that are cached."""

    def __init__(
        self,
        folder: RemoteFolder,
        listed: dict[str, RemoteVersion],
        keys: dict[str, str],
        limits: CacheLimits,
    ):
        """`listed`: the files that were verified; `keys`: a hash of their content. By name."""
        super().__init__()
        self._folder, self._listed, self._keys = folder, listed, keys
        try:
            self._cache = BlockCache(limits)
        except OSError as error:
            raise DataError(
                f"{error.filename}: the cache of {folder} cannot be used ({error.strerror}).",
                fix="Set data.cache_folder.",
            ) from None

    def expect(self, files: int) -> None:
        """No-op: no files are kept open."""

    def read(self, path: str, size: int, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset` of the file named `path`; raises DataError."""
        self.read_all([(path, size, offset, out)])

    def read_all(self, requests: Sequence[FileRequest]) -> None:
        """`read` for several requests, whose missing blocks are fetched at the same time."""
        sizes = {self._keys[path]: (path, size) for path, size, _, _ in requests}
        names = {
            (self._keys[path], number): None
            for path, _, offset, out in requests
            for number in _blocks(offset, len(out))
        }

        def fetch(missing: Sequence[BlockName]) -> Sequence[bytes]:
            ranges = []
            for key, number in missing:
                path, size = sizes[key]
                start = number * BLOCK_BYTES
                ranges.append((path, start, min(size, start + BLOCK_BYTES)))
            try:
                return read_ranges(self._folder, ranges)
            finally:  # the better message, if reading failed for this reason
                self._check_unchanged({path for path, _, _ in ranges})

        blocks = self._cache.read(list(names), fetch)
        for path, _, offset, out in requests:
            done = 0
            for number in _blocks(offset, len(out)):
                block = blocks[self._keys[path], number]
                start = offset + done - number * BLOCK_BYTES
                part = block[start : start + len(out) - done]
                out[done : done + len(part)] = part
                done += len(part)

    def _check_unchanged(self, paths: set[str]) -> None:
        """Raise DataError if one of the files was replaced since the run started."""
        with remote_errors(str(self._folder)):
            found = self._folder.files()
        for path in sorted(paths):
            if found.get(path) != self._listed[path]:
                raise DataError(
                    f"{self._folder}/{path}: was replaced or removed since this run started.",
                    fix="Restore the file; do not change a corpus during a run.",
                )


def _blocks(offset: int, count: int) -> range:
    """Numbers of the blocks that have some of the bytes [offset, offset + count)."""
    return range(offset // BLOCK_BYTES, -(-(offset + count) // BLOCK_BYTES))


def read_ranges(folder: RemoteFolder, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """Bytes [start, end) of files of a folder, several at the same time; raises DataError."""
    requested = [entry for entry in ranges if entry[1] < entry[2]]
    paths = [folder.path_of(path) for path, _, _ in requested]
    starts, ends = [start for _, start, _ in requested], [end for _, _, end in requested]
    with remote_errors(str(folder)):
        contents = folder.fs.cat_ranges(paths, starts, ends, on_error="raise") if paths else []
    for (path, start, end), content in zip(requested, contents, strict=True):
        if len(content) != end - start:
            raise DataError(
                f"{folder}/{path}: gave {len(content)} bytes instead of {end - start}.",
                fix="Restore the file; do not change a corpus during a run.",
            )
    received = iter(contents)
    return [next(received) if start < end else b"" for _, start, end in ranges]


def open_shards(
    path: str | Path, checks: CorpusChecks, files: OpenFiles, *, packed: bool | None = False
) -> Corpus:
    """Open shards on this machine or by URL; raises DataError. `packed`: see `open_corpus`."""
    if is_data_url(path):
        return open_remote_corpus(str(path), checks, packed)
    return open_corpus(path, checks, files, packed=packed)


def open_remote_corpus(url: str, checks: CorpusChecks, packed: bool | None = False) -> Corpus:
    """Open a folder of shards by URL; raises DataError. `packed`: see `open_corpus`."""
    with remote_errors(url):
        folder = RemoteFolder(url)
        present = folder.files()
    if MANIFEST not in present:
        raise DataError(
            f"{url}: has no {MANIFEST}" + ("." if present else ", or does not exist."),
            fix="Copy a complete folder there that scripts/prepare_data.py made.",
        )
    with remote_errors(str(folder)):
        content = folder.fs.cat_file(folder.path_of(MANIFEST))
    manifest = parse_corpus_manifest(content, f"{url}/{MANIFEST}")
    check_packing(url, manifest, packed)
    shard_files = {n: file.bytes for n, file in present.items() if n.endswith((".bin", ".idx"))}
    compare_listing(url, shard_files, manifest)
    samples = _verify(folder, manifest, checks)
    shards = _open_shards(folder, manifest, samples)
    keys = {f"{s.name}.bin": _key(folder, s) for s in manifest.shards}
    corpus = Corpus(url, shards, manifest, RemoteFiles(folder, present, keys, checks.cache))
    if corpus.tokens == 0:
        raise DataError(f"{url}: contains no tokens.")
    return corpus


def _key(folder: RemoteFolder, record: ShardRecord) -> str:
    """Name of a file's blocks in the cache; it changes with the content of the file."""
    text = f"{folder} {record.name} {record.bin_bytes} {record.bin_hash}"
    return xxhash.xxh3_128_hexdigest(text.encode())


def _open_shards(
    folder: RemoteFolder, manifest: CorpusManifest, samples: Sequence[str | None]
) -> list[CorpusShard]:
    """The shards, by the manifest and the header of each index."""
    names = [f"{record.name}.idx" for record in manifest.shards]
    headers = read_ranges(folder, [(name, 0, INDEX_HEADER.size) for name in names])
    shards: list[CorpusShard] = []
    begin = 0
    for record, sample, name, header in zip(manifest.shards, samples, names, headers, strict=True):
        ids_type, _, _ = parse_header(f"{folder}/{name}", record.idx_bytes, header)
        if record.tokens * ids_type.itemsize != record.bin_bytes:
            raise damaged_error(f"{folder}/{name}")
        path, size = f"{record.name}.bin", record.bin_bytes
        shard = CorpusShard(path, ids_type, begin, record.tokens, size, record.documents, sample)
        shards.append(shard)
        begin += record.tokens
    return shards


def _verify(
    folder: RemoteFolder, manifest: CorpusManifest, checks: CorpusChecks
) -> list[str | None]:
    """Compare the content with the manifest; returns the hash of each .bin's sampled blocks."""
    if checks.verify == "full":
        rank, ranks = checks.verify_slice
        for record in manifest.shards[rank::ranks]:
            for ending, size, recorded in (
                ("bin", record.bin_bytes, record.bin_hash),
                ("idx", record.idx_bytes, record.idx_hash),
            ):
                _verify_file(folder, f"{record.name}.{ending}", size, recorded)
    if checks.verify == "off":
        return [None] * len(manifest.shards)
    ranges = [
        (f"{record.name}.bin", start, start + count)
        for record in manifest.shards
        for start, count in sampled_blocks(record.bin_bytes)
    ]
    contents, samples = iter(read_ranges(folder, ranges)), list[str | None]()
    for record in manifest.shards:
        digest = xxhash.xxh3_128(str(record.bin_bytes).encode())
        for _ in sampled_blocks(record.bin_bytes):
            digest.update(next(contents))
        if digest.hexdigest() != record.bin_sample:
            raise damaged_error(f"{folder}/{record.name}.bin")
        samples.append(digest.hexdigest())
    return samples


def _verify_file(folder: RemoteFolder, name: str, size: int, recorded: str) -> None:
    """Compare every byte of a file with its hash; raises DataError."""
    digest = xxhash.xxh3_128()
    for start in range(0, size, _HASHED_BYTES):
        (content,) = read_ranges(folder, [(name, start, min(size, start + _HASHED_BYTES))])
        digest.update(content)
    if digest.hexdigest() != recorded:
        raise damaged_error(f"{folder}/{name}")
