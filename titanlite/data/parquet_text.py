"""Documents in .parquet files, one per row, in bounded memory whatever the file claims."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from titanlite.data.text_files import FileRange, not_utf8_error, open_text_file, too_long_error
from titanlite.data.urls import StorageError, is_data_url
from titanlite.errors import DataError

# Limits for a .parquet, where a few bytes could expand until they fill the memory
_MAX_EXPANSION = 1000  # bytes of text per byte of the file: no text compresses better
_ALWAYS_ALLOWED_BYTES = 256 << 20  # of text in a row group, whatever its compressed size
_ALWAYS_ALLOWED_ROWS = 1 << 20  # in a row group, whatever its compressed size
_BATCH_ROWS = 1024


class ParquetRow(NamedTuple):
    """One row: its text, or (kind, error) of what cannot be read there."""

    text: str
    number: int  # in the file, from 1
    problem: tuple[str, DataError] | None = None


def count_row_groups(path: str, text_field: str) -> int:
    """Row groups of a .parquet that has the text column; raises DataError."""
    with ExitStack() as stack:
        return _open_parquet(stack, path, text_field).num_row_groups


def read_parquet_rows(part: FileRange, text_field: str, max_bytes: int) -> Iterator[ParquetRow]:
    """The rows of the row groups [start, end) of a .parquet; null and "" are "".

    A row group that is damaged ends with one row that has the problem.
    """
    import pyarrow  # type: ignore[import-untyped]  # pyarrow has no stubs

    with ExitStack() as stack:
        try:
            as_values = _open_parquet(stack, part.path, text_field)  # first: it checks the column
            as_dictionary = _open_parquet(
                stack, part.path, text_field, read_dictionary=[text_field]
            )
        except StorageError:
            raise
        except DataError as error:
            yield ParquetRow("", 1, ("damaged", error))
            return
        metadata = as_values.metadata
        first = 1 + sum(metadata.row_group(group).num_rows for group in range(part.start))
        for group in range(part.start, min(part.end, metadata.num_row_groups)):
            location = f"{part.path}, row group {group}"
            try:
                column, compressed = _find_column(as_values, group, text_field, location, part)
                use_dictionary, rows = _choose_decoding(column.encodings)
                file = as_dictionary if use_dictionary else as_values
                batches = file.iter_batches(
                    rows, row_groups=[group], columns=[text_field], use_threads=False
                )
                yield from _decode_rows(location, batches, compressed, max_bytes, first)
            except StorageError:
                raise
            except DataError as error:
                yield ParquetRow("", first, ("damaged", error))
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                problem = DataError(f"{location}: cannot be read ({error}).")
                yield ParquetRow("", first, ("damaged", problem))
            first += metadata.row_group(group).num_rows


def _find_column(
    file: Any, group: int, text_field: str, location: str, part: FileRange
) -> tuple[Any, int]:
    """(metadata of the text column, its compressed bytes) of a row group; raises DataError."""
    metadata = file.metadata.row_group(group)
    columns = map(metadata.column, range(metadata.num_columns))
    column = next((c for c in columns if c.path_in_schema == text_field), None)
    if column is None:
        raise DataError(f'{location}: has no column "{text_field}", although the file lists it.')
    compressed = min(column.total_compressed_size, part.file_bytes)
    _refuse_expansion(location, column, compressed)
    return column, compressed


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
    location: str, batches: Iterable[Any], compressed: int, max_bytes: int, first: int
) -> Iterator[ParquetRow]:
    """Each row, decoded one at a time; `first` is the number of the first."""
    allowed = max(_ALWAYS_ALLOWED_BYTES, _MAX_EXPANSION * compressed)
    total, number = 0, first
    for batch in batches:
        for value in batch.column(0):
            row = _decode_row(location, value, max_bytes, number)
            total, number = total + len(row.text), number + 1
            if total > allowed:
                raise _expansion_error(location, f"more than {allowed:,} characters", compressed)
            yield row


def _decode_row(location: str, value: Any, max_bytes: int, number: int) -> ParquetRow:
    """One pyarrow scalar as a row; "" for null."""
    if not value.is_valid:
        return ParquetRow("", number)
    content = getattr(value, "value", value)  # the entry of a dictionary is in `value`
    if len(content.as_buffer()) > max_bytes:
        return ParquetRow("", number, ("too_long", too_long_error(location, max_bytes)))
    try:
        return ParquetRow(content.as_py(), number)
    except UnicodeDecodeError as error:
        fix = "Write the file again with valid UTF-8, or leave it out."
        problem = not_utf8_error(location, error.object[error.start], fix)
        return ParquetRow("", number, ("not_utf8", problem))


def _expansion_error(location: str, expanded: str, compressed: int) -> DataError:
    return DataError(
        f"{location}: {compressed:,} bytes expand to {expanded}; no text compresses that well.",
        fix="Leave the file out. If its content is correct, write it as .jsonl.",
    )


def _open_parquet(
    stack: ExitStack, path: str, text_field: str, read_dictionary: list[str] | None = None
) -> Any:
    """Open a .parquet that has a text column, until `stack` is closed; raises DataError."""
    try:
        import pyarrow
        import pyarrow.parquet  # type: ignore[import-untyped]  # pyarrow has no stubs
    except ImportError as missing:
        raise DataError(
            f"{path}: needs pyarrow, which is not installed.", fix="pip install 'titanlite[corpus]'"
        ) from missing
    try:
        source: Any = path
        # The footer gives the lengths of its lists: none can be longer than the file.
        longest = 1_000_000
        if is_data_url(path):
            source = stack.enter_context(open_text_file(path))
        else:
            longest = min(longest, max(1, os.path.getsize(path)))
        file = pyarrow.parquet.ParquetFile(
            source,
            read_dictionary=read_dictionary,
            pre_buffer=False,
            thrift_container_size_limit=longest,
        )
        schema = file.schema_arrow
    except StorageError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a name of a column
        raise DataError(f"{path}: is not a readable .parquet ({error}).") from None
    _check_text_column(path, schema, text_field)
    return file


def _check_text_column(path: str, schema: Any, text_field: str) -> None:
    """Raise DataError unless a schema has a column of text."""
    import pyarrow

    if text_field not in (names := schema.names):
        raise DataError(f'{path}: has no column "{text_field}", only {", ".join(names)}.')
    column_type = schema.field(text_field).type
    if pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_null)
    is_view = getattr(pyarrow.types, "is_string_view", pyarrow.types.is_string)  # pyarrow >= 16
    if not any(is_type(column_type) for is_type in (*is_text, is_view)):
        raise DataError(f'{path}: its column "{text_field}" contains {column_type}, not text.')
