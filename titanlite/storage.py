"""A folder on this machine, or by URL (`s3://…`, `memory://…`) wherever fsspec reaches.

Every path is literal. Calls of fsspec that expand `*`, `?` and `[` (`rm`, `mv`, `copy`, `get`) are
not used: removing `lr[12]/step-4` by `rm` removes the steps of `lr1` and `lr2`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import IO, TypeVar

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from titanlite.errors import CheckpointError, UserError

CHUNK_BYTES = 1 << 23
UNFINISHED = "unfinished"  # the file that marks a folder as being written, or being removed
DELETIONS_AT_ONCE = 16  # requests in flight; an object store answers each after tens of ms

Method = TypeVar("Method", bound=Callable)


class StorageUnreachable(CheckpointError):
    """A remote file system that did not do what it was asked; nothing is known of what it holds."""


def _named_errors(method: Method) -> Method:
    """Let a method of `StorageFolder` raise StoreUnreachable where a remote file system fails.

    Each has errors of its own (botocore's are no OSErrors). That a file is missing, or exists, is
    an answer and no failure.
    """

    @wraps(method)
    def call(place: StorageFolder, *args, **kwargs):
        try:
            return method(place, *args, **kwargs)
        except (FileNotFoundError, FileExistsError, NotADirectoryError, UserError):
            raise
        except Exception as error:
            if place.local:
                raise
            raise StorageUnreachable(
                f"{place}: the store failed: {type(error).__name__}: {error}.",
                fix="Check the store and the credentials for it, then run the same command again.",
            ) from error

    return call


def is_url(text: str) -> bool:
    """Whether a setting names another file system than this machine's."""
    return "://" in text and not text.startswith("file://")


class StorageFolder:
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

    def __truediv__(self, name: str) -> StorageFolder:
        return StorageFolder(f"{self.said.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> StorageFolder:
        return StorageFolder(self.said.rstrip("/").rpartition("/")[0] or ".")

    @_named_errors
    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.path)

    def sizes(self) -> dict[str, int]:
        """Name and bytes of every file directly in it; none where it is not there."""
        return {name: entry["size"] for name, entry in self._entries("file").items()}

    def folders(self) -> list[str]:
        """Names of the folders directly in it; a local link to a folder, on another disk, is one."""
        found = set(self._entries("directory"))
        if self.local:
            found |= {name for name in self._entries("link") if os.path.isdir(self.file(name))}
        return sorted(found)

    @_named_errors
    def _entries(self, kind: str) -> dict[str, dict]:
        self.fs.invalidate_cache()  # another process may have written since
        try:
            listed = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in listed}
        kinds = {name: "link" if e.get("islink") else e["type"] for name, e in named.items()}
        return {name: entry for name, entry in named.items() if kinds[name] == kind}

    @_named_errors
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

    @_named_errors
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

    @_named_errors
    def write_atomically(self, name: str, content: bytes) -> None:
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

    @_named_errors
    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not be there yet; whether it was so.

        Of several processes that try, one succeeds where the store knows conditional puts (S3,
        Google Cloud Storage). Elsewhere it is a look and then a write, which two may do at once.
        """
        path = self.file(name)
        try:
            self.fs.pipe_file(path, content, mode="create")
            return True
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):  # a file system without a conditional put
            pass
        except OSError as error:
            if error.errno != errno.ENOSYS:  # not "NotImplemented", a store without one
                if self._has(name):
                    return False
                raise
        if self._has(name):
            return False
        self.fs.pipe_file(path, content)
        return True

    def _has(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.file(name))

    @_named_errors
    def delete(self, name: str) -> None:
        self.fs.rm_file(self.file(name))

    @_named_errors
    def rename_file(self, name: str, other: str) -> None:
        """Give a file another name, in place of what has that name; a copy in an object store."""
        if self.local:
            os.replace(self.file(name), self.file(other))
        else:
            self.fs.cp_file(self.file(name), self.file(other))
            self.fs.rm_file(self.file(name))

    @_named_errors
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

    def rename(self, name: str) -> StorageFolder:
        """Give a local folder another name beside where it is. No store renames a folder cheaply."""
        assert self.local, f"{self}: would be copied"
        target = self.parent / name
        os.rename(self.path, target.path)
        self.parent.settle()
        return target

    def remove(self, first: str) -> None:
        """Delete the folder and what is in it.

        Cut short anywhere, it leaves the folder whole or known as one to remove: a local one under
        another name; elsewhere without the file `first`, which makes it valid, and with the marker
        `unfinished`, which is deleted last. Of a link, the link is deleted alone.
        """
        if self.local and os.path.islink(self.path):
            os.unlink(self.path)
            return
        if self.local:
            gone = f"{self.path}.removed"
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(self.path, gone)
            shutil.rmtree(gone)
            return
        self.write_atomically(UNFINISHED, b"")
        names = set(self._files_below())
        if first in names:
            self.delete(first)
        # Some file systems of fsspec are not safe to use from several threads; these are.
        with ThreadPoolExecutor(DELETIONS_AT_ONCE if self.fs.async_impl else 1) as pool:
            list(pool.map(self.delete, names - {first, UNFINISHED}))
        self.delete(UNFINISHED)
        with suppress(Exception):  # an object store has no folders
            for folder in (*self._folders_below(), ""):
                self.fs.rmdir(self.file(folder).rstrip("/"))

    def _files_below(self) -> list[str]:
        """Names of the files in it and in its folders."""
        names = list(self.sizes())
        for folder in self.folders():
            names += [f"{folder}/{name}" for name in (self / folder)._files_below()]
        return names

    def _folders_below(self) -> list[str]:
        """Names of the folders in it and in those, the innermost first."""
        names = []
        for folder in self.folders():
            names += [f"{folder}/{name}" for name in (self / folder)._folders_below()] + [folder]
        return names


class HashingStream:
    """A file to write to, once through, that knows the hash of what it was given."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.bytes, self.digest = raw, 0, xxhash.xxh3_128()
        self.error: Exception | None = None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            written = self.raw.write(data)
        except Exception as error:  # a store has errors of its own kinds
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
