"""Files by URL, through the file systems of fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titanlite.errors import DataError, UserError


def is_data_url(path: str | Path) -> bool:
    """Whether a path is a URL of a file system of fsspec."""
    return isinstance(path, str) and "://" in path


def open_file_system(url: str) -> tuple[Any, str]:
    """The file system of fsspec for a URL, and the path in it; raises DataError."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:  # a missing package, or an unknown scheme
        raise DataError(f"{url}: cannot be opened: {error}.") from None


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Raise what a remote file system raises, of any class, as a DataError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except FileNotFoundError:
        raise DataError(f"{url}: no such file or folder.") from None
    except Exception as error:  # each file system has errors of its own
        raise DataError(
            f"{url}: cannot be read ({type(error).__name__}: {error}).",
            fix="Check the URL and its credentials, then run the same command again.",
        ) from None
