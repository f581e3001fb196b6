"""A folder on this machine, or by URL (`s3://…`, `memory://…`) wherever fsspec reaches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from titanlite.errors import CheckpointError

CHUNK_BYTES = 1 << 23


def is_url(text: str) -> bool:
    """Whether a setting names another file system than this machine's."""
    return "://" in text and not text.startswith("file://")


class Place:
    """One folder; it need not be there yet. What is written is on the disk when a call returns.

    Raises CheckpointError for a URL that nothing here understands.
    """

    def __init__(self, path: str | Path):
        self.said = str(path)  # as the user wrote it, for messages
        try:
            self.fs, whole = url_to_fs(self.said)
        except (ImportError, ValueError) as error:  # a package that is missing, or no such scheme
            raise CheckpointError(f"{self.said}: cannot be reached: {error}.") from None
        self.path = whole.rstrip("/")
        self.local = isinstance(self.fs, LocalFileSystem)

    def __str__(self) -> str:
        return self.said

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.said.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        return Place(self.said.rstrip("/").rpartition("/")[0] or ".")

    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.path)

    def sizes(self) -> dict[str, int]:
        """Name and bytes of every file directly in it; none where it is not there."""
        return {name: entry["size"] for name, entry in self._entries("file").items()}

    def folders(self) -> list[str]:
        """Names of the folders directly in it."""
        return sorted(self._entries("directory"))

    def _entries(self, kind: str) -> dict[str, dict]:
        self.fs.invalidate_cache()  # another process may have written since
        try:
            listed = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in listed}
        return {name: entry for name, entry in named.items() if entry["type"] == kind}

    def make(self) -> None:
        self.fs.makedirs(self.path, exist_ok=True)

    def check_room(self, needed: int, fix: str) -> None:
        """Raise CheckpointError where so many bytes, and what goes with them, cannot fit."""
        free = shutil.disk_usage(self.path).free if self.local else None
        if free is not None and free < needed * 1.01 + (1 << 20):  # names, headers, a manifest
            raise CheckpointError(
                f"{self}: needs {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there.",
                fix=fix,
            )

    # --- files ---------------------------------------------------------------------------------

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self.file(name))

    @contextmanager
    def reading(self, name: str) -> Iterator[IO[bytes]]:
        with self.fs.open(self.file(name), "rb") as stream:
            yield stream

    @contextmanager
    def writing(self, name: str) -> Iterator[HashingStream]:
        """A stream that is on the disk, under its name, when the block has ended well."""
        with self.fs.open(self.file(name), "wb") as raw:
            stream = HashingStream(raw)
            try:
                yield stream
            except RuntimeError as error:  # torch.save's, in place of what went wrong
                raise (stream.error or error) from None
            raw.flush()
            if self.local:
                os.fsync(raw.fileno())

    def write_at_once(self, name: str, content: bytes) -> None:
        """All of the content under its name, or nothing: an object store's put, or a rename."""
        if not self.local:
            self.fs.pipe_file(self.file(name), content)
            return
        with self.writing(f"{name}.tmp") as stream:
            stream.write(content)
        self.settle()  # the names of the other files, before the one that vouches for them
        os.replace(self.file(f"{name}.tmp"), self.file(name))
        self.settle()
        self.parent.settle()

    def delete(self, name: str) -> None:
        self.fs.rm_file(self.file(name))

    def hash_of(self, name: str) -> str:
        """xxh3_128 of a file's content."""
        digest = xxhash.xxh3_128()
        if not self.local:
            with self.reading(name) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    digest.update(chunk)
            return digest.hexdigest()
        part = memoryview(bytearray(1 << 20))  # one for all: fresh memory costs more than hashing
        with open(self.file(name), "rb", buffering=0) as raw:
            while count := raw.readinto(part):
                digest.update(part[:count])
        return digest.hexdigest()

    def settle(self) -> None:
        """Let the disk have the folder's list of names."""
        if self.local:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # --- whole folders -------------------------------------------------------------------------

    def rename(self, name: str) -> Place:
        """Give it another name beside where it is."""
        target = self.parent / name
        self.fs.mv(self.path, target.path, recursive=True)
        return target

    def remove(self, first: str) -> None:
        """Delete it, out of sight in one act: a rename, or elsewhere, the file `first`."""
        if self.local:
            gone = f"{self.path}.removed"
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(self.path, gone)
            shutil.rmtree(gone)
            return
        if self.fs.exists(self.file(first)):
            self.fs.rm_file(self.file(first))
        self.fs.rm(self.path, recursive=True)


class HashingStream:
    """A file to write to, once through, that knows the hash of what it was given."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.bytes, self.digest = raw, 0, xxhash.xxh3_128()
        self.error: OSError | None = None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            written = self.raw.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += memoryview(data).nbytes
        return written

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.raw.flush()

    def close(self) -> None:  # closed by the block that opened it
        pass

    @property
    def hash(self) -> str:
        return self.digest.hexdigest()
