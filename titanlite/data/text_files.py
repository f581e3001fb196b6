"""Find the files that inputs name, on this machine or by URL, and open them."""

from __future__ import annotations

import glob
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import xxhash

from titanlite.data.urls import (
    RemoteFile,
    is_data_url,
    list_files_below,
    open_file_system,
    remote_errors,
    storage_errors,
    version_of,
)
from titanlite.errors import DataError
from titanlite.log import logger, pluralize

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
INPUT_KINDS = (
    "a .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet file; a folder of them; a pattern like"
    " 'books/*.txt'; a URL of any of these"
)
UNKNOWN_END = 1 << 62  # of a URL whose server does not give a size

# the options of the scripts that read text, and the keys of a recipe
_DOCUMENT_LIMIT = "--document-mib N, or read.document_mib in a recipe (train.py has no such option)"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRange:
    """A file, or a part of a file: bytes [start, end), or row groups [start, end) of a .parquet.

    `prepare` hashes the fields with their names: to rename one is to prepare all text again.
    """

    path: str  # or URL
    file_bytes: int  # of a dataset: the number of its parts, because it is not a file
    modified_ns: int  # together with the size, detects a changed file; of a URL: a hash
    start: int
    end: int
    bytes: int  # of the range, on the disk; for row groups about

    def split(self, limit: int) -> list[FileRange]:
        """Ranges of about `limit` bytes; a file that cannot be entered midway is not split."""
        divisible = self.path.endswith((".jsonl", ".parquet")) and self.start < self.end
        if not divisible or self.bytes <= limit:
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
        """Whether the file is not the one that was listed; raises OSError or StorageError."""
        if is_data_url(self.path):
            fs, path = open_file_system(self.path)
            fs.invalidate_cache(path)
            found = _describe_url(self.path)
            return (found.file_bytes, found.modified_ns) != (self.file_bytes, self.modified_ns)
        status = os.stat(self.path)
        return (status.st_size, status.st_mtime_ns) != (self.file_bytes, self.modified_ns)


# --- files of this machine -----------------------------------------------------------------------


def find_files(
    inputs: Sequence[str | Path],
    suffixes: tuple[str, ...] = SUFFIXES,
    all_unread: list[Path] | None = None,
) -> list[Path | str]:
    """List the files that `inputs` name, each once, in a fixed order; raises DataError.

    A folder gives its files that end with one of `suffixes`; `all_unread` gets the others. URLs are
    strings in the result. Symbolic links are followed.
    """
    files: dict[Path | str, Path | str] = {}  # real path or URL -> path as it was given
    skipped: list[tuple[str, list[Path], list[Path]]] = []  # an input, what it reads, and skips
    for given in inputs:
        if is_data_url(given):
            files |= {url: url for url in _find_urls(str(given), suffixes)}
            continue
        try:
            texts, others = _find_local(str(given), suffixes)
        except OSError as error:
            raise _unreadable_error(error) from None
        skipped.append((str(given), texts, others))
        for file in texts:
            files.setdefault(file.resolve(), file)
    for name, texts, others in skipped:  # last: another input may name what a folder skips
        if unread := sorted({file for file in others if file.resolve() not in files}):
            _report_skipped(name, texts, unread)
            if all_unread is not None:
                all_unread += unread
    return list(files.values())


def _find_local(given: str, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """(the files of one input, those that its folders skip); raises DataError or OSError."""
    if exists := Path(given).exists():
        matches = [given]
    else:
        _check_listable(given)
        matches = glob.glob(given, recursive=True)
    if not matches or (not exists and matches == [given]):  # the latter is a broken link
        raise DataError(f"{given}: no such file or folder, and as a pattern it matches none.")
    others: list[Path] = []
    texts = [
        file for match in sorted(matches) for file in _files_below(Path(match), suffixes, others)
    ]
    if not texts:
        raise _no_text_error(given, suffixes)
    return texts, others


def _report_skipped(given: str, texts: list[Path], others: list[Path]) -> None:
    """Log the files of a folder that are not read; raises DataError if they have most bytes."""
    suffixes = Counter(file.suffix for file in others).most_common(5)
    kinds = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes)
    read, skipped = (sum(file.stat().st_size for file in files) for files in (texts, others))
    message = (
        f"{given}: reads {pluralize(len(texts), 'file')} ({read / 1e6:.1f} MB) and skips"
        f" {len(others):,} ({skipped / 1e6:.1f} MB): {kinds}"
    )
    name = next((f"/**/*{suffix}" for suffix, _ in suffixes if suffix), "/FILE")
    pattern = f"'{given.rstrip('/')}{name}'"
    if skipped > read:
        raise DataError(
            f"{message}. Most of it would be left out.",
            fix=f"Name also what is text, as a pattern: {pattern}; or only what shall be read, as"
            f" '{given.rstrip('/')}/**/*{texts[0].suffix}'.",
        )
    logger.info("%s. A pattern reads others: %s", message, pattern)


def _unreadable_error(error: OSError) -> DataError:
    return DataError(f"{error.filename}: cannot be read ({error.strerror}).")


def _no_text_error(given: str, suffixes: tuple[str, ...]) -> DataError:
    return DataError(
        f"{given}: contains no text files.",
        fix=f"In a folder, files that end with {' '.join(suffixes)} are read; a pattern reads"
        f" others: '{given.rstrip('/')}/**/*.md'.",
    )


def _check_listable(pattern: str) -> None:
    """Raise OSError if a folder that a pattern looks into cannot be listed: `glob` ignores it."""
    parts = Path(pattern).parts
    for depth in range(1, len(parts)):
        for folder in filter(os.path.isdir, glob.glob(str(Path(*parts[:depth])), recursive=True)):
            os.scandir(folder).close()


def _files_below(path: Path, suffixes: tuple[str, ...], others: list[Path]) -> list[Path]:
    """The file, or a folder's text files, sorted; `others` gets its other files. Raises OSError."""
    if not path.is_dir():
        if _is_beyond_cycle(path):
            return []
        _refuse_irregular([path])
        return [path]
    texts: list[Path] = []
    visited: set[str] = set()
    for folder, subfolders, files in os.walk(path, onerror=_raise, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:  # reached by a link to a parent folder
            subfolders.clear()
            continue
        visited.add(real)
        texts += [Path(folder, name) for name in files if name.endswith(suffixes)]
        if not any(part.startswith(".") for part in Path(folder).relative_to(path).parts):
            rest = (name for name in files if not name.endswith(suffixes) and name[0] != ".")
            others += [file for name in rest if (file := Path(folder, name)).is_file()]
    _refuse_irregular(texts)
    return sorted(texts)


def _is_beyond_cycle(path: Path) -> bool:
    """Whether a path has more links than the system follows, to what a shorter path reaches.

    `glob` follows a link to a parent folder again and again.
    """
    shorter = os.path.join(os.path.realpath(path.parent), path.name)
    return not path.exists() and os.path.exists(shorter)


def _raise(error: OSError) -> None:
    raise error


def _refuse_irregular(files: Iterable[Path]) -> None:
    """Raise DataError for what is no file with an end, or has a name that cannot be recorded."""
    for file in files:
        if not file.is_file():
            kind = "a broken link" if file.is_symlink() else "not a regular file"
            raise DataError(f"{file}: is {kind}.", fix="Remove it, or name the other files.")
        try:
            str(file).encode()
        except UnicodeEncodeError:
            name = ascii(os.fsencode(file))[1:]
            raise DataError(f"{name}: its name is not UTF-8.", fix="Rename it.") from None


def describe_file(file: str | Path) -> FileRange:
    """A file as one range of bytes; raises DataError."""
    if is_data_url(file):
        with remote_errors(str(file)):
            return _describe_url(str(file))
    try:
        status = os.stat(file)
    except OSError as error:
        raise _unreadable_error(error) from None
    return FileRange(
        str(file), status.st_size, status.st_mtime_ns, 0, status.st_size, status.st_size
    )


@contextmanager
def open_text_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file on this machine or by URL, open for reading; raises OSError or StorageError."""
    if is_data_url(path):
        with io.BufferedReader(RemoteFile(str(path)), _BUFFER_BYTES) as stream:
            yield cast(IO[bytes], stream)
    else:
        with open(path, "rb") as file:
            yield file


# --- URLs ----------------------------------------------------------------------------------------


def _find_urls(url: str, suffixes: tuple[str, ...]) -> list[str]:
    """The URLs of a file, a folder or a pattern, sorted; a "?" of http is not a pattern."""
    with remote_errors(url):
        fs, path = open_file_system(url)
        is_http = url.startswith(("http://", "https://"))
        if not is_http and re.search(r"[*?[]", path):
            found = sorted(_match_pattern(fs, path))
            if not found:
                raise DataError(f"{url}: no such file or folder, and as a pattern it matches none.")
        elif not is_http and fs.isdir(path):
            found = sorted(p for p in list_files_below(fs, path) if p.endswith(suffixes))
            if not found:
                raise _no_text_error(url, suffixes)
        else:
            fs.info(path)  # raises if it does not exist
            return [url]
        return [fs.unstrip_protocol(p) for p in found]


def _match_pattern(fs: Any, pattern: str) -> list[str]:
    """The paths of the files that match a pattern on a file system of fsspec."""
    from fsspec.utils import glob_translate

    first = next(re.finditer(r"[*?[]", pattern)).start()
    root = pattern[:first].rpartition("/")[0]
    depth = None if "**" in pattern else pattern.count("/", len(root)) or 1
    matches = re.compile(glob_translate(pattern)).match
    try:
        return [path for path in list_files_below(fs, root, depth) if matches(path)]
    except FileNotFoundError:
        return []


def _describe_url(url: str) -> FileRange:
    """A file by URL, as it is now; raises FileNotFoundError or StorageError."""
    fs, path = open_file_system(url)
    with storage_errors(url):
        info = fs.info(path)
    size = info.get("size")
    version = xxhash.xxh3_64_intdigest(version_of(info).encode()) >> 1
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
        " titanlite prepare needs about 50 times the limit in memory.",
    )
