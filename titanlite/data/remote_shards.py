"""Shards by URL (`s3://…`), read in ranges, several at the same time.

The folder must have a manifest: it gives the sizes of all files, and hashes of blocks of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from titanlite.data.manifest import (
    MANIFEST,
    CorpusManifest,
    compare_listing,
    parse_corpus_manifest,
    sampled_blocks,
)
from titanlite.data.open_files import FileRequest, OpenFiles
from titanlite.data.shards import (
    INDEX_HEADER,
    Corpus,
    CorpusShard,
    check_packing,
    damaged_error,
    open_corpus,
    parse_header,
)
from titanlite.data.token_source import CorpusChecks
from titanlite.data.urls import is_data_url, open_file_system, remote_errors, version_of
from titanlite.errors import DataError

_HASHED_BYTES = 1 << 24  # of one request, when whole files are verified


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


class RemoteFiles(OpenFiles):
    """Files of one remote folder, read by position."""

    reads_together = True

    def __init__(self, folder: RemoteFolder, listed: dict[str, RemoteVersion]):
        """`listed`: the files that were verified, by name."""
        super().__init__()
        self._folder, self._listed = folder, listed

    def expect(self, files: int) -> None:
        """No-op: no files are kept open."""

    def read(self, path: str, size: int, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset` of the file named `path`; raises DataError."""
        self.read_all([(path, size, offset, out)])

    def read_all(self, requests: Sequence[FileRequest]) -> None:
        """`read` for several requests, at the same time."""
        if not requests:
            return
        ranges = [(path, offset, offset + len(out)) for path, _, offset, out in requests]
        try:
            contents = read_ranges(self._folder, ranges)
        finally:  # the better message, if reading failed for this reason
            self._check_unchanged({path for path, _, _ in ranges})
        for (_, _, _, out), content in zip(requests, contents, strict=True):
            out[:] = content

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
            fix="Copy a complete folder there that titanlite prepare made.",
        )
    with remote_errors(str(folder)):
        content = folder.fs.cat_file(folder.path_of(MANIFEST))
    manifest = parse_corpus_manifest(content, f"{url}/{MANIFEST}")
    check_packing(url, manifest, packed)
    shard_files = {n: file.bytes for n, file in present.items() if n.endswith((".bin", ".idx"))}
    compare_listing(url, shard_files, manifest)
    samples = _verify(folder, manifest, checks)
    shards = _open_shards(folder, manifest, samples)
    return Corpus(url, shards, manifest, RemoteFiles(folder, present))


def _open_shards(
    folder: RemoteFolder, manifest: CorpusManifest, samples: Sequence[str | None]
) -> list[CorpusShard]:
    """The shards, by the manifest and the header of each index."""
    names = [f"{record.name}.idx" for record in manifest.shards]
    headers = read_ranges(folder, [(name, 0, INDEX_HEADER.size) for name in names])
    shards: list[CorpusShard] = []
    begin = 0
    for record, sample, name, header in zip(manifest.shards, samples, names, headers, strict=True):
        ids_type, _ = parse_header(f"{folder}/{name}", record.idx_bytes, header)
        if record.tokens * ids_type.itemsize != record.bin_bytes:
            raise damaged_error(f"{folder}/{name}")
        path = f"{record.name}.bin"
        shards.append(CorpusShard(path, ids_type, begin, record.tokens, record.bin_bytes, sample))
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
