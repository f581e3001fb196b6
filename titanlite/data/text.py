"""The documents in files of text: .txt (one each), .jsonl (one a line), .parquet (one a row).

Text is taken as it is: no newline is translated, and bytes that are not UTF-8 are refused.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.data.links import refuse_outward_links
from titanlite.errors import DataError
from titanlite.files import parse_json

SUFFIXES = (".txt", ".jsonl", ".parquet")
INPUT_KINDS = "a .txt, .jsonl or .parquet; a folder of them; a pattern like 'books/*.txt'"
FIELD = "text"  # of a line of .jsonl; the column of a .parquet
DOCUMENT_BYTES = 128 << 20  # at most of a .txt, of a line, of a row: a document is held in memory

_FOLLOW = "scripts/prepare_data.py --follow-symlinks"
_EXPANSION = 1000  # at most as many bytes of text as bytes of a .parquet: no text compresses so far
_LEAST_EXPANDED = 256 << 20  # bytes of text that any row group may expand to
_LEAST_ROWS = 1 << 20  # rows that any row group may have
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class FileRange:
    """A file, or a stretch of one: bytes [start, end), or row groups of a .parquet."""

    path: str
    file_bytes: int
    modified_ns: int  # with the size, what tells that a file has changed
    start: int
    end: int
    bytes: int

    def split(self, limit: int) -> list[FileRange]:
        """Parts of about `limit` bytes, where documents can be told apart without reading all."""
        if not self.path.endswith((".jsonl", ".parquet")) or self.bytes <= limit:
            return [self]
        units = self.end - self.start
        step = max(1, units * limit // self.bytes)
        cuts = [*range(self.start, self.end, step), self.end]
        sizes = [self.bytes * (cut - self.start) // units for cut in cuts]
        return [
            replace(self, start=start, end=end, bytes=above - below)
            for start, end, below, above in zip(cuts, cuts[1:], sizes, sizes[1:])
        ]


def find_files(inputs: Sequence[str | Path], follow_symlinks: bool = False) -> list[Path]:
    """The files that are meant, each once, in a fixed order; raises DataError.

    Links that lead out of a folder, or out of the fixed part of a pattern, are refused unless
    `follow_symlinks`. What is given by its own name may be a link.
    """
    files: dict[Path, Path] = {}  # by what it really is, as it was named
    for given in inputs:
        named = Path(given).exists()
        matches = [str(given)] if named else glob.glob(str(given), recursive=True)
        if not matches:
            raise DataError(f"{given}: there is no such file or folder, and it matches none.")
        if not named and not follow_symlinks:
            refuse_outward_links(map(Path, matches), _fixed_part(str(given)), _FOLLOW)
        found = [f for match in sorted(matches) for f in _files_of(Path(match), follow_symlinks)]
        if not found:
            raise DataError(
                f"{given}: has no files of text.",
                fix=f"A folder is searched for {' '.join(SUFFIXES)}.",
            )
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _fixed_part(pattern: str) -> Path:
    """The folder of a pattern before its first part with a *, ? or [."""
    parts = Path(pattern).parts
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?[]", part))
    return Path(*parts[:first])


def _files_of(path: Path, follow_symlinks: bool) -> list[Path]:
    if path.is_file():
        return [path]  # named, so of any suffix
    found, links, seen = [], [], set()
    for folder, folders, files in os.walk(path, followlinks=follow_symlinks):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        links += [Path(folder, name) for name in folders if os.path.islink(Path(folder, name))]
        found += [Path(folder, name) for name in files if Path(name).suffix in SUFFIXES]
    if not follow_symlinks:
        refuse_outward_links(
            [*links, *(file for file in found if file.is_symlink())], path, _FOLLOW
        )
    return sorted(file for file in found if file.is_file())


def list_file_ranges(files: Iterable[Path]) -> list[FileRange]:
    """Each file as one part."""
    parts = []
    for file in files:
        status = file.stat()
        end = _parquet(str(file)).num_row_groups if file.suffix == ".parquet" else status.st_size
        size = status.st_size
        parts.append(FileRange(str(file), size, status.st_mtime_ns, 0, end, size))
    return parts


def read_documents(parts: Iterable[FileRange], limit: int = DOCUMENT_BYTES) -> Iterator[str]:
    """The text of each document that has any; raises DataError naming the file and line.

    A document of more than `limit` bytes is refused before it is read.
    """
    readers = {".jsonl": _read_lines, ".parquet": _read_rows}
    for part in parts:
        read = readers.get(Path(part.path).suffix, _read_whole)
        try:
            yield from filter(None, read(part, limit))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{part.path}: cannot be read ({reason}).") from None


def _too_long(where: str, limit: int) -> DataError:
    return DataError(
        f"{where}: holds a document of more than {limit >> 20} MiB.",
        fix="Split it into several documents, or allow more by scripts/prepare_data.py"
        " --document-mib N; a worker needs about 50 times that of memory.",
    )


def _read_whole(part: FileRange, limit: int) -> Iterator[str]:
    with open(part.path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise _too_long(part.path, limit)
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(part.path, content[: error.start].count(b"\n") + 1, error) from None


def _read_lines(part: FileRange, limit: int) -> Iterator[str]:
    """The lines that begin in [start, end)."""
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            while (rest := file.readline(limit)) and not rest.endswith(b"\n"):
                pass  # the part before ours reads it
        here = file.tell()
        while here < part.end:
            line = file.readline(limit + 1)
            if not line:
                raise DataError(f"{part.path}: became shorter while it was read.")
            if len(line) > limit:
                raise _too_long(f"{part.path}, line {_line_number(part.path, here)}", limit)
            if not line.strip():
                pass
            elif isinstance(text := _text_of(line), str):
                yield text
            else:
                raise _bad_line(part.path, here, line, text)
            here += len(line)


def _text_of(line: bytes) -> str | Exception:
    try:
        document = parse_json(line.decode())
        if isinstance(document, dict) and isinstance(document.get(FIELD), str):
            return document[FIELD]
    except ValueError as error:
        return error
    return TypeError(f'has no "{FIELD}" that is a string')


def _line_number(path: str, start: int) -> int:
    """The number of the line that begins at byte `start`."""
    number = 1
    with open(path, "rb") as file:
        while start > 0 and (chunk := file.read(min(start, 1 << 24))):
            number, start = number + chunk.count(b"\n"), start - len(chunk)
    return number


def _bad_line(path: str, start: int, line: bytes, error: Exception) -> DataError:
    number = _line_number(path, start)
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(path, number, error)
    if isinstance(error, json.JSONDecodeError):
        error = ValueError(f"is not JSON ({error.msg} at column {error.colno})")
    shown = line[:60].decode(errors="replace").strip()
    return DataError(
        f"{path}, line {number}: {error}: {shown}",
        fix=f'Every line must be an object with a "{FIELD}"; mend or remove this one.',
    )


def _not_utf8(path: str, line: int, error: UnicodeDecodeError) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{path}, line {line}: the byte 0x{byte:02x} is not UTF-8.",
        fix="Convert the file to UTF-8, for example by iconv, or leave it out.",
    )


def _read_rows(part: FileRange, limit: int) -> Iterator[str]:
    import pyarrow

    as_dictionary, plain = _parquet(part.path, read_dictionary=[FIELD]), _parquet(part.path)
    for group in range(part.start, part.end):
        where = f"{part.path}, row group {group}"
        try:
            about = plain.metadata.row_group(group)
            columns = map(about.column, range(about.num_columns))
            column = next((c for c in columns if c.path_in_schema == FIELD), None)
            if column is None:
                raise DataError(f'{where}: has no column "{FIELD}", which the file says it has.')
            compressed = min(column.total_compressed_size, part.file_bytes)
            _refuse_expansion(where, column, compressed)
            shared, rows = _way_to_read(column.encodings)
            file = as_dictionary if shared else plain
            options = {"row_groups": [group], "columns": [FIELD], "use_threads": False}
            yield from _text_of_rows(where, file.iter_batches(rows, **options), compressed, limit)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: cannot be read ({error}).") from None


def _way_to_read(encodings: Sequence[str]) -> tuple[bool, int]:
    """Whether to read a column as a dictionary, and rows at once, so that memory stays bounded.

    As a dictionary, a value that many rows share stays one value. Arrow cannot do that where delta
    encodings occur; those that repeat parts of earlier rows are then decoded row by row.
    """
    dictionary = any("DICTIONARY" in encoding for encoding in encodings)
    delta = any(encoding.startswith("DELTA_") for encoding in encodings)
    if not dictionary and "DELTA_BYTE_ARRAY" not in encodings:
        return False, _BATCH_ROWS
    return (False, 1) if delta else (True, _BATCH_ROWS)


def _refuse_expansion(where: str, column, compressed: int) -> None:
    """Raise DataError where a row group says that it expands to more than any text does."""
    rows, size = column.num_values, column.total_uncompressed_size
    if rows > max(_LEAST_ROWS, _EXPANSION * compressed):
        raise _expands(where, f"{rows:,} rows", compressed)
    if size > max(_LEAST_EXPANDED, _EXPANSION * compressed):
        raise _expands(where, f"{size:,} bytes", compressed)


def _text_of_rows(where: str, batches: Iterable, compressed: int, limit: int) -> Iterator[str]:
    """The text of each row, decoded one row at a time."""
    allowed = max(_LEAST_EXPANDED, _EXPANSION * compressed)
    total = 0
    for batch in batches:
        for value in batch.column(0):
            text = _text_of_row(where, value, limit)
            total += len(text)
            if total > allowed:
                raise _expands(where, f"more than {allowed:,} characters", compressed)
            yield text


def _text_of_row(where: str, value, limit: int) -> str:
    """The text of one pyarrow scalar."""
    if not value.is_valid:
        return ""
    content = getattr(value, "value", value)  # of an entry of a dictionary
    if len(content.as_buffer()) > limit:
        raise _too_long(where, limit)
    try:
        return content.as_py()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{where}: the byte 0x{byte:02x} is not UTF-8.",
            fix="Write the file again with text that is, or leave it out.",
        ) from None


def _expands(where: str, to: str, compressed: int) -> DataError:
    return DataError(
        f"{where}: {compressed:,} bytes expand to {to}; text does not compress so far.",
        fix="Leave the file out. If it is meant, write it again as .jsonl.",
    )


def _parquet(path: str, read_dictionary: list[str] | None = None):
    """An open .parquet that has our column, of text."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed.", fix="pip install pyarrow"
        ) from missing
    try:
        # A footer says how long its lists are: none can be longer than the file.
        limits = {"thrift_container_size_limit": min(1_000_000, max(1, os.path.getsize(path)))}
        file = pyarrow.parquet.ParquetFile(
            path, read_dictionary=read_dictionary, pre_buffer=False, **limits
        )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a .parquet that can be read ({error}).") from None
    if FIELD not in (names := file.schema_arrow.names):
        raise DataError(f'{path}: has no column "{FIELD}", only {", ".join(names)}.')
    kind = file.schema_arrow.field(FIELD).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_null)
    views = getattr(pyarrow.types, "is_string_view", pyarrow.types.is_string)  # since pyarrow 16
    if not any(is_kind(kind) for is_kind in (*text, views)):
        raise DataError(f'{path}: its column "{FIELD}" holds {kind}, not text.')
    return file
