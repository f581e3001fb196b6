"""Document tables: what the stages before tokenising exchange, and their files.

A table has one row per document. The table that a task writes is one file. It is written and read
in parts of about `TABLE_BYTES` of text, which are tables too, and the row groups of the file. So a
task needs the memory of one part, however large the file is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow has no stubs
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from titanlite.errors import DataError

TEXT, SOURCE, ORIGIN = "text", "source", "origin"
DOCUMENTS = "documents.parquet"
TABLE_BYTES = 64 << 20  # of text
# "origin": see Document.origin
DOCUMENT_SCHEMA = pa.schema(
    [
        (TEXT, pa.large_string()),
        (SOURCE, pa.dictionary(pa.int32(), pa.string())),
        (ORIGIN, pa.string()),
    ]
)


def build_table(texts: Sequence[str] | Any, source: str, origins: Sequence[str] | Any) -> Any:
    """A document table of one source."""
    indices = pa.array(np.zeros(len(texts), np.int32))
    names = pa.DictionaryArray.from_arrays(indices, pa.array([source], pa.string()))
    columns = [pa.array(texts, pa.large_string()), names, pa.array(origins, pa.string())]
    return pa.Table.from_arrays(columns, schema=DOCUMENT_SCHEMA)


def text_bytes(table: Any) -> int:
    """Bytes of text (UTF-8) in a table."""
    return pc.sum(pc.binary_length(table[TEXT])).as_py() or 0


def write_tables(folder: Path, tables: Iterable[Any]) -> None:
    """Write tables as one file `documents.parquet`; each becomes a row group."""
    with pq.ParquetWriter(
        folder / DOCUMENTS,
        DOCUMENT_SCHEMA,
        compression={TEXT: "zstd", SOURCE: "zstd", ORIGIN: "zstd"},
        use_dictionary=[SOURCE],  # texts and origins are different in each row
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for table in tables:
            if table.num_rows:
                writer.write_table(table.cast(DOCUMENT_SCHEMA), row_group_size=table.num_rows)


def read_tables(folder: Path) -> Iterator[Any]:
    """Yield the tables of a folder, one row group after the other; raises DataError."""
    path = folder / DOCUMENTS
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=False).cast(DOCUMENT_SCHEMA)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}).",
            fix="Remove its folder, then run the same command again: it is made again.",
        ) from None
