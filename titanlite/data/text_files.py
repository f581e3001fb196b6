"""Find the files that inputs name, on this machine or by URL, and open them."""

from __future__ import annotations

import glob
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, cast

import xxhash

from titanlite.data.links import refuse_outward_links
from titanlite.data.urls import is_data_url, open_file_system, remote_errors
from titanlite.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
INPUT_KINDS = (
    "a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file; a folder of them; a pattern like"
    " 'books/*.txt'; a URL of any of these"
)
UNKNOWN_END = 1 << 62  # of a URL whose server does not give a size

# the options of the scripts that read text, and the keys of a recipe
_ALLOW_LINKS = "--follow-symlinks, or read.follow_symlinks = true in a recipe"
_DOCUMENT_LIMIT = "--document-mib N, or read.document_mib in a recipe"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRange:
    """A file, or a part of a file: bytes [start, end), or row groups [start, end) of a .parquet.

    `prepare` hashes the fields with their names, so after renaming a field it would prepare all
    text again.
    """

    path: str  # or URL
    file_bytes: int  # of a dataset: the number of its parts, because it is not a file
    modified_ns: int  # together with the size, detects a changed file; of a URL: a hash
    start: int
    end: int
    bytes: int

    def split(self, limit: int) -> list[FileRange]:
        """Ranges of about `limit` bytes; a file that cannot be entered midway is not split."""
        if not self.path.endswith((".jsonl", ".parquet")) or self.bytes <= limit:
            return [self]
        units = self.end - self.start
        step = max(1, units * limit // self.bytes)
        bounds = [*range(self.start, self.end, step), self.end]
        offsets = [self.bytes * (bound - self.start) // units for bound in bounds]  # in bytes
        return [
            replace(self, start=start, end=end, bytes=last - first)
            for (start, end), (first, last) in zip(pairwise(bounds), pairwise(offsets), strict=True)
        ]

    def has_changed(self) -> bool:
        """Whether the file on this machine is not the one that was listed; raises OSError."""
        if is_data_url(self.path):
            return False  # what is read belongs to one request
        status = os.stat(self.path)
        return (status.st_size, status.st_mtime_ns) != (self.file_bytes, self.modified_ns)


# --- files of this machine -----------------------------------------------------------------------


def find_files(
    inputs: Sequence[str | Path],
    follow_symlinks: bool = False,
    suffixes: tuple[str, ...] = SUFFIXES,
) -> list[Path | str]:
    """List the files that `inputs` name, each once, in a fixed order; raises DataError.

    A folder gives its files that end with one of `suffixes`. URLs are strings in the result. Links
    that lead out of a folder, or out of the fixed part of a pattern, are refused unless
    `follow_symlinks`. A file that is given by its own name may be a link.
    """
    files: dict[Path | str, Path | str] = {}  # real path or URL -> path as it was given
    for given in inputs:
        if is_data_url(given):
            files |= {url: url for url in _find_urls(str(given), suffixes)}
            continue
        exists = Path(given).exists()
        matches = [str(given)] if exists else glob.glob(str(given), recursive=True)
        if not matches or (not exists and matches == [str(given)]):  # the latter is a broken link
            raise DataError(f"{given}: no such file or folder, and as a pattern it matches none.")
        if not exists and not follow_symlinks:
            refuse_outward_links(map(Path, matches), _fixed_part(str(given)), _ALLOW_LINKS)
        found = (_files_below(Path(match), follow_symlinks, suffixes) for match in sorted(matches))
        texts = [file for files_of_match in found for file in files_of_match]
        if not texts:
            raise _no_text_error(str(given), suffixes)
        for file in texts:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _no_text_error(given: str, suffixes: tuple[str, ...]) -> DataError:
    return DataError(
        f"{given}: contains no text files.",
        fix=f"In a folder, files that end with {' '.join(suffixes)} are read.",
    )


def _fixed_part(pattern: str) -> Path:
    """The folders of a pattern before the first component with a *, ? or [."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?[]", part))
    return Path(*parts[:first])


def _files_below(path: Path, follow_symlinks: bool, suffixes: tuple[str, ...]) -> list[Path]:
    """The file itself, whatever its suffix, or the text files in a folder, in sorted order."""
    if path.is_file():
        return [path]
    texts: list[Path] = []
    links: list[Path] = []
    visited: set[str] = set()
    for folder, subfolders, files in os.walk(path, followlinks=follow_symlinks):
        if (real := os.path.realpath(folder)) in visited:  # reached by a link to a parent folder
            subfolders.clear()
            continue
        visited.add(real)
        links += [Path(folder, name) for name in subfolders if os.path.islink(Path(folder, name))]
        texts += [Path(folder, name) for name in files if name.endswith(suffixes)]
    if not follow_symlinks:
        links += [file for file in texts if file.is_symlink()]
        refuse_outward_links(links, path, _ALLOW_LINKS)
    return sorted(file for file in texts if file.is_file())


def describe_file(file: str | Path) -> FileRange:
    """A file as one range of bytes; raises DataError."""
    if is_data_url(file):
        return _describe_url(str(file))
    status = os.stat(file)
    return FileRange(
        str(file), status.st_size, status.st_mtime_ns, 0, status.st_size, status.st_size
    )


@contextmanager
def open_text_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file on this machine or by URL, open for reading; raises OSError or DataError."""
    if not is_data_url(path):
        with open(path, "rb") as file:
            yield file
        return
    with remote_errors(str(path)):
        fs, remote = open_file_system(str(path))
        with fs.open(remote, "rb") as stream:
            yield cast(IO[bytes], io.BufferedReader(stream, _BUFFER_BYTES))


# --- URLs ----------------------------------------------------------------------------------------


def _find_urls(url: str, suffixes: tuple[str, ...]) -> list[str]:
    """The URLs of a file, a folder or a pattern, sorted; a "?" of http is not a pattern."""
    with remote_errors(url):
        fs, path = open_file_system(url)
        is_http = url.startswith(("http://", "https://"))
        if not is_http and re.search(r"[*?[]", path):
            found = sorted(p for p in fs.glob(path) if fs.isfile(p))
            if not found:
                raise DataError(f"{url}: no such file or folder, and as a pattern it matches none.")
        elif not is_http and fs.isdir(path):
            found = sorted(p for p in fs.find(path) if p.endswith(suffixes))
            if not found:
                raise _no_text_error(url, suffixes)
        else:
            fs.info(path)  # raises if it does not exist
            return [url]
        return [fs.unstrip_protocol(p) for p in found]


def _describe_url(url: str) -> FileRange:
    with remote_errors(url):
        fs, path = open_file_system(url)
        size = fs.info(path).get("size")
        version = xxhash.xxh3_64_intdigest(str(fs.ukey(path)).encode()) >> 1
    return FileRange(url, size or 0, version, 0, UNKNOWN_END if size is None else size, size or 0)


def not_utf8_error(location: str, byte: int, fix: str = "") -> DataError:
    """The error for a byte that is not UTF-8."""
    default = "Convert the file to UTF-8, for example with iconv, or leave it out."
    return DataError(f"{location}: the byte 0x{byte:02x} is not UTF-8.", fix=fix or default)


def too_long_error(location: str, max_bytes: int) -> DataError:
    """The error for a document above the limit."""
    return DataError(
        f"{location}: contains a document of more than {max_bytes >> 20} MiB.",
        fix=f"Split it into several documents, or raise the limit: {_DOCUMENT_LIMIT}. A worker of"
        " scripts/prepare_data.py needs about 50 times the limit in memory.",
    )
