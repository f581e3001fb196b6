"""The documents in files of text: .txt (one each), .jsonl (one a line), .parquet (one a row).

Text is taken as it is: no newline is translated, and bytes that are not UTF-8 are refused.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.errors import DataError
from titanlite.files import parse_json

SUFFIXES = (".txt", ".jsonl", ".parquet")
INPUT_KINDS = "a .txt, .jsonl or .parquet; a folder of them; a pattern like 'books/*.txt'"
FIELD = "text"  # of a line of .jsonl; the column of a .parquet


@dataclass(frozen=True)
class Part:
    """A file, or a stretch of one: bytes [start, end), or row groups of a .parquet."""

    path: str
    file_bytes: int
    modified_ns: int  # with the size, what tells that a file has changed
    start: int
    end: int
    bytes: int

    def split(self, limit: int) -> list[Part]:
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


def find_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that are meant, each once, in a fixed order; raises DataError."""
    files: dict[Path, Path] = {}  # by what it really is, as it was named
    for given in inputs:
        matches = [str(given)] if Path(given).exists() else glob.glob(str(given), recursive=True)
        if not matches:
            raise DataError(f"{given}: there is no such file or folder, and it matches none.")
        found = [file for match in sorted(matches) for file in _files_of(Path(match))]
        if not found:
            raise DataError(
                f"{given}: has no files of text.",
                fix=f"A folder is searched for {' '.join(SUFFIXES)}.",
            )
        for file in found:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]  # named, so of any suffix
    return sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())


def parts_of(files: Iterable[Path]) -> list[Part]:
    """Each file as one part."""
    parts = []
    for file in files:
        status = file.stat()
        end = _parquet(str(file)).num_row_groups if file.suffix == ".parquet" else status.st_size
        size = status.st_size
        parts.append(Part(str(file), size, status.st_mtime_ns, 0, end, size))
    return parts


def read_documents(parts: Iterable[Part]) -> Iterator[str]:
    """The text of each document that has any; raises DataError naming the file and line."""
    readers = {".jsonl": _read_lines, ".parquet": _read_rows}
    for part in parts:
        read = readers.get(Path(part.path).suffix, _read_whole)
        try:
            yield from filter(None, read(part))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{part.path}: cannot be read ({reason}).") from None


def _read_whole(part: Part) -> Iterator[str]:
    content = Path(part.path).read_bytes()
    try:
        yield content.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(part.path, content[: error.start].count(b"\n") + 1, error) from None


def _read_lines(part: Part) -> Iterator[str]:
    """The lines that begin in [start, end)."""
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the part before ours reads it
        here = file.tell()
        while here < part.end:
            line = file.readline()
            if not line:
                raise DataError(f"{part.path}: became shorter while it was read.")
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


def _bad_line(path: str, start: int, line: bytes, error: Exception) -> DataError:
    number = 1
    with open(path, "rb") as file:
        while start > 0 and (chunk := file.read(min(start, 1 << 24))):
            number, start = number + chunk.count(b"\n"), start - len(chunk)
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


def _read_rows(part: Part) -> Iterator[str]:
    import pyarrow

    file = _parquet(part.path)
    for group in range(part.start, part.end):
        try:
            column = file.read_row_group(group, columns=[FIELD]).column(FIELD)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{part.path}, row group {group}: cannot be read ({error}).") from None
        for chunk in column.chunks:
            for text in chunk.to_pylist():
                if text is None or isinstance(text, str):
                    yield text or ""
                else:
                    raise DataError(
                        f'{part.path}: its column "{FIELD}" holds {column.type}, not text.'
                    )


def _parquet(path: str):
    """An open .parquet that has our column."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as missing:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed.", fix="pip install pyarrow"
        ) from missing
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a .parquet that can be read ({error}).") from None
    if FIELD not in (names := file.schema_arrow.names):
        raise DataError(f'{path}: has no column "{FIELD}", only {", ".join(names)}.')
    return file
