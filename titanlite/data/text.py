"""Documents in text files: a .txt is one, a .jsonl has one per line, a .parquet one per row.

Text is not changed: newlines are not translated. Each problem of a file goes to a handler, which
raises it or counts it: bytes that are not UTF-8, a line that is not JSON, a truncated file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, NoReturn

from titanlite.data.parquet_text import count_row_groups, read_parquet_rows
from titanlite.data.text_files import (
    UNKNOWN_END,
    FileRange,
    describe_file,
    not_utf8_error,
    open_text_file,
    too_long_error,
)
from titanlite.data.urls import StorageError
from titanlite.errors import DataError
from titanlite.files import parse_json

TEXT_FIELD = "text"  # key of each line of a .jsonl; column of a .parquet
MAX_DOCUMENT_BYTES = 128 << 20  # of a .txt, a line or a row: a document is read into memory
COMPRESSIONS = (".gz", ".zst")
_SKIPPED_BYTES = 1 << 20


class Document(NamedTuple):
    """One document, and where it is from."""

    text: str
    origin: str
    # "file", "file:line" or "file:row"; "file:byte 123" in later parts of a .jsonl, where the line
    # number is not known; "file:URL" of a web page; "URL:shard:row" of the `datasets` library


class ReadProblem(NamedTuple):
    """A part of a file that cannot be read."""

    kind: str  # "not_json", "not_utf8", "not_html", "too_long", "damaged", "changed"
    error: DataError


ProblemHandler = Callable[[ReadProblem], None]


def raise_problem(problem: ReadProblem) -> NoReturn:
    """A `ProblemHandler` that refuses the file."""
    raise problem.error


@dataclass(frozen=True)
class TextRules:
    """How documents are found in files."""

    text_field: str = TEXT_FIELD
    max_bytes: int = MAX_DOCUMENT_BYTES
    json_fields: tuple[str, ...] = ()
    # if not empty: a document is an object as JSON, with those of these keys that its line has


def list_file_ranges(
    files: Iterable[str | Path],
    text_field: str = TEXT_FIELD,
    on_problem: ProblemHandler = raise_problem,
) -> list[FileRange]:
    """Each file as one range; a .parquet that cannot be opened is one if `on_problem` returns."""
    ranges = []
    for file in files:
        part = describe_file(file)
        if part.path.endswith(".parquet"):
            try:
                part = replace(part, end=count_row_groups(part.path, text_field))
            except StorageError:
                raise
            except DataError as error:
                on_problem(ReadProblem("damaged", error))
                part = replace(part, end=1)  # reading it reports the problem again
        ranges.append(part)
    return ranges


def read_documents(
    ranges: Iterable[FileRange], max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[str]:
    """Yield the text of documents that are not empty; raises DataError, as above `max_bytes`."""
    for document in read_located_documents(ranges, TextRules(max_bytes=max_bytes)):
        if document.text:
            yield document.text


def read_located_documents(
    ranges: Iterable[FileRange], rules: TextRules, on_problem: ProblemHandler = raise_problem
) -> Iterator[Document]:
    """Yield each document; those of an empty line are left out, an empty text is not.

    `on_problem` gets what cannot be read. If it returns, reading continues after the line, the row
    group or the file.
    """
    for part in ranges:
        yield from report_failures(part, _read_range(part, rules, on_problem), on_problem)


def report_failures(
    part: FileRange, documents: Iterable[Document], on_problem: ProblemHandler
) -> Iterator[Document]:
    """Yield a file's documents; `on_problem` gets what fails or changed, but no StorageError."""
    try:
        try:
            yield from documents
        except StorageError:  # some file systems notice that a file was replaced
            if not part.has_changed():
                raise
        changed = part.has_changed()
    except OSError as error:
        reason = error.strerror or error
        problem = DataError(f"{part.path}: cannot be read ({reason}).")
        on_problem(ReadProblem("damaged", problem))
        return
    if changed:
        problem = DataError(
            f"{part.path}: changed since the files were listed.",
            fix="Run the same command again when nothing writes to it.",
        )
        on_problem(ReadProblem("changed", problem))


def _read_range(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    suffix = Path(part.path).suffix
    if suffix == ".parquet":
        for row in read_parquet_rows(part, rules.text_field, rules.max_bytes):
            if row.problem:
                on_problem(ReadProblem(*row.problem))
            else:
                yield Document(row.text, f"{part.path}:{row.number}")
    elif suffix == ".jsonl" or suffix in COMPRESSIONS:
        yield from _LineReader(part, rules, on_problem).read()
    else:
        yield from _read_text_file(part, rules, on_problem)


def _read_text_file(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    with open_text_file(part.path) as file:
        content = file.read(rules.max_bytes + 1)
    if len(content) > rules.max_bytes:
        on_problem(ReadProblem("too_long", too_long_error(part.path, rules.max_bytes)))
        return
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problem = not_utf8_error(f"{part.path}, line {line}", content[error.start])
        on_problem(ReadProblem("not_utf8", problem))
        return
    yield Document(text, part.path)


class _LineReader:
    """Reads the documents of the lines that begin in a range of a .jsonl, or of a compressed one.

    Lines are counted from the top of the file; in a later range, only for a problem that is raised.
    Others there are named by their first byte: there may be one in each line.
    """

    def __init__(self, part: FileRange, rules: TextRules, on_problem: ProblemHandler):
        self._part, self._rules, self._on_problem = part, rules, on_problem
        self._position = self._number = 0  # of the line that is being read

    def read(self) -> Iterator[Document]:
        path = self._part.path
        with open_text_file(path) as file:
            if not path.endswith(COMPRESSIONS):
                yield from self._read_lines(file, self._part.end)
            elif self._part.file_bytes or self._part.end == UNKNOWN_END:
                yield from self._read_lines(decompress(file, path), UNKNOWN_END)

    def _read_lines(self, file: IO[bytes], end: int) -> Iterator[Document]:
        max_bytes = self._rules.max_bytes
        if self._part.start:
            file.seek(self._part.start - 1)
            self._position = self._part.start - 1
            self._position += self._skip_line(file, end - self._position)
        while self._position < end:
            line = file.readline(max_bytes + 1)
            self._number += 1
            if not line:
                if end != UNKNOWN_END:
                    problem = f"{self._part.path}: became shorter while it was read."
                    self._on_problem(ReadProblem("changed", DataError(problem)))
                return
            size = len(line)
            if size > max_bytes:
                error = too_long_error(self._location(), max_bytes)
                self._on_problem(ReadProblem("too_long", error))
                most = 0 if line.endswith(b"\n") else max(0, end - self._position - size)
                size += self._skip_line(file, most)
            elif line.strip() and (text := self._parse(line)) is not None:
                place = f"byte {self._position}" if self._part.start else self._number
                yield Document(text, f"{self._part.path}:{place}")
            self._position += size

    def _skip_line(self, file: IO[bytes], most: int) -> int:
        """Read to the end of a line, but at most `most` bytes; returns their number."""
        size = 0
        while rest := file.readline(min(_SKIPPED_BYTES, most - size)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        return size

    def _location(self) -> str:
        path, number = self._part.path, self._number
        if self._part.start:
            if self._on_problem is not raise_problem:
                return f"{path}, byte {self._position}"
            number = _line_number(path, self._position)
        return f"{path}, line {number}"

    def _parse(self, line: bytes) -> str | None:
        """The text of a line; None after a problem that was not raised."""
        field, keys = self._rules.text_field, self._rules.json_fields
        try:
            document = parse_json(line.decode())
        except UnicodeDecodeError as error:
            problem = not_utf8_error(self._location(), line[error.start])
            self._on_problem(ReadProblem("not_utf8", problem))
            return None
        except json.JSONDecodeError as error:
            reason = f"is not JSON ({error.msg} at column {error.colno})"
        except ValueError as error:
            reason = str(error)
        else:
            document = document if isinstance(document, dict) else {}
            if found := {key: document[key] for key in keys if key in document}:
                return json.dumps(found)
            if isinstance(value := document.get(field), str) and not keys:
                return value
            reason = f'has no "{field}"' + ("" if keys else " that is a string")
        shown = line[:60].decode(errors="replace").strip()
        problem = DataError(
            f"{self._location()}: {reason}: {shown}",
            fix=f'Every line must be an object with a "{field}"; fix or remove this one.',
        )
        self._on_problem(ReadProblem("not_json", problem))
        return None


def decompress(file: IO[bytes], path: str) -> IO[bytes]:
    """The content of a .gz or .zst file; reading it raises OSError if it is truncated."""
    if path.endswith(".gz"):
        return io.BufferedReader(_WholeGzip(file), _SKIPPED_BYTES)
    try:
        import pyarrow  # type: ignore[import-untyped]  # pyarrow has no stubs
    except ImportError:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed.", fix="pip install 'titanlite[corpus]'"
        ) from None
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return io.BufferedReader(stream, _SKIPPED_BYTES)


class _WholeGzip(gzip.GzipFile):
    """A gzip file that raises OSError, and nothing else, if it is truncated or damaged."""

    def __init__(self, file: IO[bytes]):
        super().__init__(fileobj=file, mode="rb")

    def readinto(self, buffer) -> int:
        try:
            content = self.read1(len(buffer))
        except (EOFError, zlib.error) as error:
            raise OSError(str(error)) from error
        buffer[: len(content)] = content
        return len(content)


def _line_number(path: str, position: int) -> int:
    number = 1
    with open_text_file(path) as file:
        while position > 0 and (chunk := file.read(min(position, 1 << 24))):
            number, position = number + chunk.count(b"\n"), position - len(chunk)
    return number
