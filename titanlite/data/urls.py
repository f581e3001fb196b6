"""Files by URL, through the file systems of fsspec."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titanlite.errors import DataError, UserError
from titanlite.files import check_url

# What tells the versions of a file apart, by file system; the first that `info` has. A listing and
# a request for one file give the same value for these, but not for all that `info` has.
_VERSION_KEYS = (
    *("ETag", "etag", "blob_id", "generation", "Content-MD5", "Digest"),
    *("Last-Modified", "LastModified", "last_modified", "mtime", "created"),
)


class StorageError(DataError):
    """A file system that refuses or does not answer; never skipped: a later try may succeed."""


def is_data_url(path: str | Path) -> bool:
    """Whether a path is a URL of a file system of fsspec."""
    return isinstance(path, str) and "://" in path


def open_file_system(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it; raises DataError."""
    from fsspec.core import url_to_fs

    try:
        check_url(url)
        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing package, or an unknown scheme
        raise DataError(f"{url}: cannot be opened: {error}.") from None


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Raise what a remote file system raises, of any class, as a DataError."""
    try:
        with storage_errors(url):
            yield
    except FileNotFoundError:
        raise DataError(f"{url}: no such file or folder.") from None


@contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Raise what a remote file system raises as a StorageError, or as FileNotFoundError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url) from None
    except Exception as error:  # each file system has errors of its own
        raise StorageError(
            f"{url}: cannot be read ({type(error).__name__}: {error}).",
            fix="Check the URL and its credentials, then run the same command again.",
        ) from None


class RemoteFile(io.RawIOBase):
    """A file by URL, open for reading; raises StorageError, and FileNotFoundError if it is gone.

    So whoever decodes its content can tell damaged content from storage that fails.
    """

    def __init__(self, url: str):
        fs, path = open_file_system(url)
        self._url = url
        with storage_errors(url):
            self._file = fs.open(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = 0) -> int:
        with storage_errors(self._url):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        with storage_errors(self._url):
            content = self._file.read(len(view))
        view[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def version_of(info: Mapping[str, Any]) -> str:
    """What tells a file by URL from other versions of it, besides the size; "" if unknown."""
    known = ((key, info.get(key)) for key in _VERSION_KEYS)
    return next((f"{key} {value}" for key, value in known if value is not None), "")


def list_files_below(fs: Any, folder: str, depth: int | None = None) -> Iterator[str]:
    """The paths of all files in a folder, and in `depth` - 1 levels of folders below; None: all.

    `find` and `glob` of fsspec leave out a folder that cannot be listed; here it is an error.
    """
    for entry in fs.ls(folder, detail=True):
        path = entry["name"].rstrip("/")
        if path == folder.rstrip("/"):  # object stores may have an empty object for a folder
            continue
        if entry["type"] != "directory":
            yield path
        elif depth != 1:
            yield from list_files_below(fs, path, depth and depth - 1)
