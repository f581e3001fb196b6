"""Documents in text files: a .txt is one, a .jsonl has one per line, a .parquet one per row.

Text is not changed: newlines are not translated, and bytes that are not UTF-8 are refused.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from titanlite.data.links import refuse_outward_links
from titanlite.errors import DataError
from titanlite.files import parse_json

SUFFIXES = (".txt", ".jsonl", ".parquet")
INPUT_KINDS = "a .txt, .jsonl or .parquet file; a folder of them; a pattern like 'books/*.txt'"
TEXT_FIELD = "text"  # key of each line of a .jsonl; column of a .parquet
MAX_DOCUMENT_BYTES = 128 << 20  # of a .txt, a line or a row: a document is read into memory

_ALLOW_LINKS = "--follow-symlinks"  # of the scripts that read text
# Limits for a .parquet, where a few bytes could expand until they fill the memory
_MAX_EXPANSION = 1000  # bytes of text per byte of the file: no text compresses better
_ALWAYS_ALLOWED_BYTES = 256 << 20  # of text in a row group, whatever its compressed size
_ALWAYS_ALLOWED_ROWS = 1 << 20  # in a row group, whatever its compressed size
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class FileRange:
    """A file, or a part of a file: bytes [start, end), or row groups [start, end) of a .parquet.

    `prepare` hashes the fields with their names, so after renaming a field it would prepare all
    text again.
    """

    path: str
    file_bytes: int
    modified_ns: int  # together with the size, detects a changed file
    start: int
    end: int
    bytes: int

    def split(self, limit: int) -> list[FileRange]:
        """Ranges of about `limit` bytes; a file that is one document is not split."""
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


def find_files(inputs: Sequence[str | Path], follow_symlinks: bool = False) -> list[Path]:
    """List the files that `inputs` name, each once, in a fixed order; raises DataError.

    Links that lead out of a folder, or out of the fixed part of a pattern, are refused unless
    `follow_symlinks`. A file that is given by its own name may be a link.
    """
    files: dict[Path, Path] = {}  # real path -> path as it was given
    for given in inputs:
        exists = Path(given).exists()
        matches = [str(given)] if exists else glob.glob(str(given), recursive=True)
        if not matches or (not exists and matches == [str(given)]):  # the latter is a broken link
            raise DataError(f"{given}: no such file or folder, and as a pattern it matches none.")
        if not exists and not follow_symlinks:
            refuse_outward_links(map(Path, matches), _fixed_part(str(given)), _ALLOW_LINKS)
        texts = [f for match in sorted(matches) for f in _text_files(Path(match), follow_symlinks)]
        if not texts:
            raise DataError(
                f"{given}: contains no text files.",
                fix=f"In a folder, files that end with {' '.join(SUFFIXES)} are read.",
            )
        for file in texts:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _fixed_part(pattern: str) -> Path:
    """The folders of a pattern before the first component with a *, ? or [."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?[]", part))
    return Path(*parts[:first])


def _text_files(path: Path, follow_symlinks: bool) -> list[Path]:
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
        texts += [Path(folder, name) for name in files if Path(name).suffix in SUFFIXES]
    if not follow_symlinks:
        links += [file for file in texts if file.is_symlink()]
        refuse_outward_links(links, path, _ALLOW_LINKS)
    return sorted(file for file in texts if file.is_file())


def list_file_ranges(files: Iterable[Path]) -> list[FileRange]:
    """Each file as one range."""
    ranges = []
    for file in files:
        status = file.stat()
        size = status.st_size
        end = _open_parquet(str(file)).num_row_groups if file.suffix == ".parquet" else size
        ranges.append(FileRange(str(file), size, status.st_mtime_ns, 0, end, size))
    return ranges


def read_documents(
    ranges: Iterable[FileRange], max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[str]:
    """Yield the text of each document that is not empty; errors name the file.

    Raises DataError, also for a document of more than `max_bytes`, before it is decoded.
    """
    readers = {".jsonl": _read_lines, ".parquet": _read_rows}
    for part in ranges:
        read = readers.get(Path(part.path).suffix, _read_text_file)
        try:
            yield from filter(None, read(part, max_bytes))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{part.path}: cannot be read ({reason}).") from None


def _too_long_error(location: str, max_bytes: int) -> DataError:
    return DataError(
        f"{location}: contains a document of more than {max_bytes >> 20} MiB.",
        fix="Split it into several documents, or raise the limit: --document-mib N. A worker of"
        " scripts/prepare_data.py needs about 50 times the limit in memory.",
    )


def _read_text_file(part: FileRange, max_bytes: int) -> Iterator[str]:
    with open(part.path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_long_error(part.path, max_bytes)
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise _not_utf8_error(part.path, line, error) from None


def _read_lines(part: FileRange, max_bytes: int) -> Iterator[str]:
    """The documents of the lines that begin in [start, end)."""
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass  # this line began in the range before, which reads it
        position = file.tell()
        while position < part.end:
            line = file.readline(max_bytes + 1)
            if not line:
                raise DataError(f"{part.path}: became shorter while it was read.")
            if len(line) > max_bytes:
                number = _line_number(part.path, position)
                raise _too_long_error(f"{part.path}, line {number}", max_bytes)
            if line.strip():
                yield _parse_line(part.path, position, line)
            position += len(line)


def _parse_line(path: str, position: int, line: bytes) -> str:
    """The text of a line of .jsonl that begins at byte `position`; raises DataError."""
    try:
        document = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8_error(path, _line_number(path, position), error) from None
    except json.JSONDecodeError as error:
        reason = f"is not JSON ({error.msg} at column {error.colno})"
    except ValueError as error:
        reason = str(error)
    else:
        if isinstance(document, dict) and isinstance(document.get(TEXT_FIELD), str):
            return document[TEXT_FIELD]
        reason = f'has no "{TEXT_FIELD}" that is a string'
    shown = line[:60].decode(errors="replace").strip()
    raise DataError(
        f"{path}, line {_line_number(path, position)}: {reason}: {shown}",
        fix=f'Every line must be an object with a "{TEXT_FIELD}"; fix or remove this one.',
    )


def _line_number(path: str, position: int) -> int:
    """The number of the line that begins at byte `position`."""
    number = 1
    with open(path, "rb") as file:
        while position > 0 and (chunk := file.read(min(position, 1 << 24))):
            number, position = number + chunk.count(b"\n"), position - len(chunk)
    return number


def _not_utf8_error(path: str, line: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{path}, line {line}: the byte 0x{byte:02x} is not UTF-8.",
        fix="Convert the file to UTF-8, for example with iconv, or leave it out.",
    )


def _read_rows(part: FileRange, max_bytes: int) -> Iterator[str]:
    """The documents of the row groups [start, end) of a .parquet."""
    import pyarrow  # type: ignore[import-untyped]  # pyarrow has no stubs

    as_dictionary = _open_parquet(part.path, read_dictionary=[TEXT_FIELD])
    as_values = _open_parquet(part.path)
    for group in range(part.start, part.end):
        location = f"{part.path}, row group {group}"
        try:
            metadata = as_values.metadata.row_group(group)
            columns = map(metadata.column, range(metadata.num_columns))
            column = next((c for c in columns if c.path_in_schema == TEXT_FIELD), None)
            if column is None:
                raise DataError(
                    f'{location}: has no column "{TEXT_FIELD}", although the file lists it.'
                )
            compressed = min(column.total_compressed_size, part.file_bytes)
            _refuse_expansion(location, column, compressed)
            use_dictionary, rows = _choose_decoding(column.encodings)
            file = as_dictionary if use_dictionary else as_values
            batches = file.iter_batches(
                rows, row_groups=[group], columns=[TEXT_FIELD], use_threads=False
            )
            yield from _decode_rows(location, batches, compressed, max_bytes)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{location}: cannot be read ({error}).") from None


def _choose_decoding(encodings: Sequence[str]) -> tuple[bool, int]:
    """(whether to read the column as a dictionary, rows per batch); both keep memory bounded.

    A dictionary stores only once a value that many rows share. Arrow cannot read a delta-encoded
    column as a dictionary; if the rows of such a column may share text, it is decoded row by row.
    """
    dictionary = any("DICTIONARY" in encoding for encoding in encodings)
    delta = any(encoding.startswith("DELTA_") for encoding in encodings)
    if not dictionary and "DELTA_BYTE_ARRAY" not in encodings:
        return False, _BATCH_ROWS
    return (False, 1) if delta else (True, _BATCH_ROWS)


def _refuse_expansion(location: str, column: Any, compressed: int) -> None:
    """Raise DataError if a row group's metadata announces more than any text expands to."""
    rows, size = column.num_values, column.total_uncompressed_size
    if rows > max(_ALWAYS_ALLOWED_ROWS, _MAX_EXPANSION * compressed):
        raise _expansion_error(location, f"{rows:,} rows", compressed)
    if size > max(_ALWAYS_ALLOWED_BYTES, _MAX_EXPANSION * compressed):
        raise _expansion_error(location, f"{size:,} bytes", compressed)


def _decode_rows(
    location: str, batches: Iterable[Any], compressed: int, max_bytes: int
) -> Iterator[str]:
    """The text of each row, decoded one row at a time."""
    allowed = max(_ALWAYS_ALLOWED_BYTES, _MAX_EXPANSION * compressed)
    total = 0
    for batch in batches:
        for value in batch.column(0):
            text = _decode_row(location, value, max_bytes)
            total += len(text)
            if total > allowed:
                raise _expansion_error(location, f"more than {allowed:,} characters", compressed)
            yield text


def _decode_row(location: str, value: Any, max_bytes: int) -> str:
    """The text of one pyarrow scalar; "" for null."""
    if not value.is_valid:
        return ""
    content = getattr(value, "value", value)  # the entry of a dictionary is in `value`
    if len(content.as_buffer()) > max_bytes:
        raise _too_long_error(location, max_bytes)
    try:
        return content.as_py()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{location}: the byte 0x{byte:02x} is not UTF-8.",
            fix="Write the file again with valid UTF-8, or leave it out.",
        ) from None


def _expansion_error(location: str, expanded: str, compressed: int) -> DataError:
    return DataError(
        f"{location}: {compressed:,} bytes expand to {expanded}; no text compresses that well.",
        fix="Leave the file out. If its content is correct, write it as .jsonl.",
    )


def _open_parquet(path: str, read_dictionary: list[str] | None = None) -> Any:
    """Open a .parquet that has a text column; raises DataError."""
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]  # pyarrow has no stubs
    except ImportError as missing:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed.", fix="pip install pyarrow"
        ) from missing
    try:
        # The footer gives the lengths of its lists: none can be longer than the file.
        limits = {"thrift_container_size_limit": min(1_000_000, max(1, os.path.getsize(path)))}
        file = pyarrow.parquet.ParquetFile(
            path, read_dictionary=read_dictionary, pre_buffer=False, **limits
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a readable .parquet ({error}).") from None
    if TEXT_FIELD not in (names := file.schema_arrow.names):
        raise DataError(f'{path}: has no column "{TEXT_FIELD}", only {", ".join(names)}.')
    column_type = file.schema_arrow.field(TEXT_FIELD).type
    if pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_null)
    is_view = getattr(pyarrow.types, "is_string_view", pyarrow.types.is_string)  # pyarrow >= 16
    if not any(is_type(column_type) for is_type in (*is_text, is_view)):
        raise DataError(f'{path}: its column "{TEXT_FIELD}" contains {column_type}, not text.')
    return file
