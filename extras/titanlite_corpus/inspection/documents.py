"""Which documents of which shards a range of ids belongs to."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titanlite.data import Corpus
from titanlite.data.shards import INDEX_HEADER
from titanlite.errors import DataError

_LENGTH, _FIRST_BYTE = struct.Struct("<i"), struct.Struct("<q")  # of a sequence, in an .idx


@dataclass(frozen=True)
class DocumentRange:
    """One document of a corpus."""

    shard: str  # name without ending
    document: int  # in the shard, from 0
    first_token: int  # in the corpus
    tokens: int

    @property
    def end(self) -> int:
        """The first id of the corpus after the document."""
        return self.first_token + self.tokens

    def to_json(self) -> dict[str, Any]:
        """The document as JSON values."""
        return asdict(self)


class CorpusDocuments:
    """Finds documents by position, reading a few numbers of an .idx for each."""

    def __init__(self, corpus: Corpus):
        self._ranges = corpus.shard_ranges()
        self._begins = [begin for _, begin, _ in self._ranges]
        self._starts = lru_cache(8)(_ShardStarts)

    def at(self, position: int) -> DocumentRange:
        """The document of an id of the corpus."""
        bin, begin, id_bytes = self._ranges[bisect_right(self._begins, position) - 1]
        starts = self._starts(bin)
        wanted = (position - begin) * id_bytes
        number = bisect_right(range(starts.sequences), wanted, key=starts.first_byte) - 1
        first, tokens = starts.first_byte(number) // id_bytes + begin, starts.length(number)
        if number < 0 or not first <= position < first + tokens:
            raise DataError(f"{bin}: its index does not describe the id {position - begin}.")
        return DocumentRange(Path(bin).stem, number, first, tokens)

    def between(self, start: int, end: int) -> Iterator[DocumentRange]:
        """The documents that have ids in [start, end)."""
        while start < end:
            document = self.at(start)
            yield document
            start = document.end


class _ShardStarts:
    """Where the sequences of a shard are, read from its .idx without loading it."""

    def __init__(self, bin: str):
        self._file = open(Path(bin).with_suffix(".idx"), "rb")  # noqa: SIM115 (kept open)
        _, _, _, self.sequences, _ = self._read(INDEX_HEADER, 0)

    def first_byte(self, number: int) -> int:
        """Offset of a sequence in the .bin."""
        return self._read(_FIRST_BYTE, INDEX_HEADER.size + 4 * self.sequences + 8 * number)[0]

    def length(self, number: int) -> int:
        """Ids of a sequence."""
        return self._read(_LENGTH, INDEX_HEADER.size + 4 * number)[0]

    def _read(self, layout: struct.Struct, offset: int) -> tuple[int, ...]:
        self._file.seek(offset)
        return layout.unpack(self._file.read(layout.size))
