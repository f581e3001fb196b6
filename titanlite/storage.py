"""A folder on this machine, or by URL (`s3://…`, `memory://…`) on any file system of fsspec.

Every path is literal. fsspec calls that expand `*`, `?` and `[` (`rm`, `mv`, `copy`, `get`) are not
used: removing `lr[12]/step-4` by `rm` removes the steps of `lr1` and `lr2`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from titanlite.errors import CheckpointError, UserError
from titanlite.files import check_url, fsync_folder, write_file_atomically
from titanlite.threads import open_thread_pool

UNFINISHED = "unfinished"  # marker file of a folder that is being written or removed
PARALLEL_DELETIONS = 16  # requests in flight; an object store answers each after tens of ms

P = ParamSpec("P")
R = TypeVar("R")


class StorageUnreachable(CheckpointError):
    """A failed call of a remote file system; what is stored there remains unknown."""


def _raise_storage_unreachable(
    method: Callable[Concatenate[StorageFolder, P], R],
) -> Callable[Concatenate[StorageFolder, P], R]:
    """Let a method of `StorageFolder` raise StorageUnreachable when a remote file system fails.

    Each has errors of its own. That a file is missing, or exists already, is no failure.
    """

    @wraps(method)
    def call(folder: StorageFolder, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(folder, *args, **kwargs)
        except (FileNotFoundError, FileExistsError, NotADirectoryError, UserError):
            raise
        except Exception as error:
            if folder.local:
                raise
            raise StorageUnreachable(
                f"{folder}: the storage failed: {type(error).__name__}: {error}.",
                fix="Check the storage and its credentials, then run the same command again.",
            ) from error

    return call


def is_url(text: str) -> bool:
    """Whether a path is a URL of another file system than this machine's."""
    return "://" in text and not text.startswith("file://")


class StorageFolder:
    """One folder, which need not exist yet. What `write_atomically` wrote is on the disk.

    Raises CheckpointError for a URL whose scheme is unknown or needs a missing package.
    """

    def __init__(self, path: str | Path):
        self._path_as_given = str(path)  # for messages
        try:
            if "://" in self._path_as_given:
                check_url(self._path_as_given)
                self.fs, full_path = url_to_fs(self._path_as_given)
            else:  # fsspec would take a::b for a chain of URLs
                self.fs = LocalFileSystem()
                full_path = LocalFileSystem._strip_protocol(self._path_as_given)
        except (ImportError, ValueError) as error:  # a missing package, or an unknown scheme
            raise CheckpointError(f"{path}: cannot be opened: {error}.") from None
        self.path = full_path.rstrip("/") or "/"
        self.local = isinstance(self.fs, LocalFileSystem)

    def __str__(self) -> str:
        return self._path_as_given

    def __truediv__(self, name: str) -> StorageFolder:
        return StorageFolder(f"{self._path_as_given.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> StorageFolder:
        return StorageFolder(os.path.dirname(self._path_as_given.rstrip("/")) or ".")

    @_raise_storage_unreachable
    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return self.fs.exists(self.path)

    def sizes(self) -> dict[str, int]:
        """Name and bytes of every file directly in the folder; empty if it does not exist."""
        return {name: entry["size"] for name, entry in self._entries("file").items()}

    def folders(self) -> list[str]:
        """Names of the direct subfolders, including symbolic links to local folders."""
        names = set(self._entries("directory"))
        if self.local:
            names |= {name for name in self._entries("link") if os.path.isdir(self.path_of(name))}
        return sorted(names)

    @_raise_storage_unreachable
    def _entries(self, kind: str) -> dict[str, dict[str, Any]]:
        self.fs.invalidate_cache()  # another process may have written since
        try:
            listed = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        entries = {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in listed}
        kinds = {name: "link" if e.get("islink") else e["type"] for name, e in entries.items()}
        return {name: entry for name, entry in entries.items() if kinds[name] == kind}

    @_raise_storage_unreachable
    def create_folder(self) -> None:
        self.fs.makedirs(self.path, exist_ok=True)

    def check_free_space(self, needed_bytes: int, fix: str) -> None:
        """Raise CheckpointError if `needed_bytes` and their overhead do not fit on the disk."""
        free = shutil.disk_usage(self.path).free if self.local else None
        overhead = 0.01 * needed_bytes + (1 << 20)  # names, headers, a manifest
        if free is not None and free < needed_bytes + overhead:
            raise CheckpointError(
                f"{self}: needs {needed_bytes / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are"
                " free there.",
                fix=fix,
            )

    # --- files ---------------------------------------------------------------------------------

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    @_raise_storage_unreachable
    def read(self, name: str) -> bytes:
        return self.fs.cat_file(self.path_of(name))

    @_raise_storage_unreachable
    def size_of(self, name: str) -> int:
        """Bytes of a file; raises FileNotFoundError."""
        self.fs.invalidate_cache()  # another process may have written since
        return self.fs.size(self.path_of(name)) or 0

    @contextmanager
    def open_for_reading(self, name: str) -> Iterator[BufferedIOBase]:
        with self.fs.open(self.path_of(name), "rb") as stream:
            yield stream

    @contextmanager
    def open_for_writing(self, name: str) -> Iterator[HashingStream]:
        """A stream whose file is on the disk when the block ends without an error."""
        with self.fs.open(self.path_of(name), "wb") as raw:
            stream = HashingStream(raw)
            try:
                yield stream
            except RuntimeError as error:  # torch.save raises it in place of the write error
                raise (stream.error or error) from None
            raw.flush()
            if self.local:
                os.fsync(raw.fileno())

    @_raise_storage_unreachable
    def write_atomically(self, name: str, content: bytes) -> None:
        """Write a file in full or not at all: an object store's put, or a local rename."""
        if not self.local:
            self.fs.pipe_file(self.path_of(name), content)
            return
        self.fsync_folder()  # other files must survive a crash if the file that lists them does
        write_file_atomically(Path(self.path_of(name)), content)
        self.parent.fsync_folder()

    @_raise_storage_unreachable
    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; returns whether it was written.

        If several processes try, one succeeds where the store has conditional puts (S3, Google
        Cloud Storage). Elsewhere two processes can succeed: the check and the write are two calls.
        """
        path = self.path_of(name)
        try:
            self.fs.pipe_file(path, content, mode="create")
            return True
        except FileExistsError:
            return False
        except (TypeError, NotImplementedError):  # a file system without a conditional put
            pass
        except OSError as error:
            if error.errno != errno.ENOSYS:  # "NotImplemented": a store without conditional puts
                if name in self.sizes():
                    return False
                raise
        if name in self.sizes():
            return False
        self.fs.pipe_file(path, content)
        return True

    @_raise_storage_unreachable
    def delete(self, name: str) -> None:
        self.fs.rm_file(self.path_of(name))

    @_raise_storage_unreachable
    def rename_file(self, name: str, new_name: str) -> None:
        """Rename a file and replace any file of the new name; a copy in an object store."""
        if self.local:
            os.replace(self.path_of(name), self.path_of(new_name))
        else:
            self.fs.cp_file(self.path_of(name), self.path_of(new_name))
            self.fs.rm_file(self.path_of(name))

    @_raise_storage_unreachable
    def hash_of(self, name: str) -> str:
        """xxh3_128 of a file's content."""
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(1 << 20))  # reused: fresh memory costs more than hashing
        with self.open_for_reading(name) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
        return digest.hexdigest()

    def fsync_folder(self) -> None:
        """Flush the folder's list of names to a local disk."""
        if self.local:
            fsync_folder(Path(self.path))

    # --- the folder itself ---------------------------------------------------------------------

    def rename(self, name: str) -> StorageFolder:
        """Rename a local folder within its parent. No object store renames a folder cheaply."""
        assert self.local, f"{self}: an object store would copy every file"
        target = self.parent / name
        os.rename(self.path, target.path)
        self.parent.fsync_folder()
        return target

    def remove(self, delete_first: str) -> None:
        """Delete the folder with all files and folders in it. Of a link, delete the link only.

        An interrupted removal leaves the folder either complete or recognisable as unfinished: a
        local folder is renamed first. In an object store the marker `unfinished` is written, then
        `delete_first`, the file that makes the folder valid, is deleted; the marker goes last.
        """
        if self.local and os.path.islink(self.path):
            os.unlink(self.path)
            return
        if self.local:
            renamed = f"{self.path}.removed"
            with suppress(FileNotFoundError):
                shutil.rmtree(renamed)
            os.rename(self.path, renamed)
            shutil.rmtree(renamed)
            return
        self.write_atomically(UNFINISHED, b"")
        folders = [*self._folders_below(), ""]
        names = {f"{folder}{name}" for folder in folders for name in (self / folder).sizes()}
        if delete_first in names:
            self.delete(delete_first)
        # Of fsspec's file systems, only the asynchronous ones are always safe with several threads.
        with open_thread_pool(PARALLEL_DELETIONS if self.fs.async_impl else 1) as pool:
            list(pool.map(self.delete, names - {delete_first, UNFINISHED}))
        self.delete(UNFINISHED)
        with suppress(Exception):  # an object store has no folders
            for folder in folders:
                self.fs.rmdir(self.path_of(folder).rstrip("/"))

    def _folders_below(self) -> Iterator[str]:
        """Relative paths of all subfolders, each with "/" at its end, the innermost first."""
        for name in self.folders():
            yield from (f"{name}/{inner}" for inner in (self / name)._folders_below())
            yield f"{name}/"


class HashingStream:
    """A write-only stream that counts and hashes (xxh3_128) the bytes written to it."""

    def __init__(self, raw: IO[bytes]):
        self.raw, self.bytes, self.digest = raw, 0, xxhash.xxh3_128()
        self.error: Exception | None = None

    def write(self, data) -> int:
        self.digest.update(data)
        try:
            written = self.raw.write(data)
        except Exception as error:  # each store has its own error classes
            self.error = error
            raise
        self.bytes += memoryview(data).nbytes
        return written

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.raw.flush()

    def close(self) -> None:  # no-op: open_for_writing closes the file
        pass

    @property
    def hash(self) -> str:
        return self.digest.hexdigest()
