"""Divide text files into units, and assign these to the lanes of a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import xxhash

from titanlite.data.manifest import hash_sampled_blocks
from titanlite.data.text import COMPRESSIONS, FileRange, read_documents
from titanlite.data.urls import is_data_url

_UNITS = 16  # of each lane; more in large files, fewer in small ones or undivided ones
# Limits of a unit: each should have documents, and a lane that starts inside one drops those before
_MIN_UNIT_BYTES, _MAX_UNIT_BYTES = 1 << 16, 8 << 20
_EXPANSION = 4  # bytes of text for a byte of a compressed file

LaneState = dict[str, int]  # where a sample begins: epoch, unit, document, token


@dataclass(frozen=True)
class TextUnit:
    """Documents that one lane reads in a row: those of a file, or every `stride`-th of them."""

    part: FileRange
    first: int = 0
    stride: int = 1

    @property
    def bytes(self) -> int:
        return self.part.bytes // self.stride

    def documents(self) -> Iterator[str]:
        """The text of each document; raises DataError."""
        return islice(read_documents([self.part]), self.first, None, self.stride)


def assign_units_to_lanes(units: Sequence[TextUnit], lanes: int) -> list[list[TextUnit]]:
    """The units of each lane, with nearly the same number of bytes: the largest go first.

    If there are fewer units than `lanes`, there are fewer lanes.
    """
    lanes = min(lanes, len(units))
    assigned: list[list[TextUnit]] = [[] for _ in range(lanes)]
    sizes = [0] * lanes
    for unit in sorted(units, key=lambda unit: -unit.bytes):  # stable
        lightest = sizes.index(min(sizes))
        assigned[lightest].append(unit)
        sizes[lightest] += unit.bytes
    return assigned


def divide_files(parts: list[FileRange], lanes: int) -> list[TextUnit]:
    """Units of about equal size; of a file that cannot be divided, every n-th document."""
    sizes = {part.path: _text_bytes(part) for part in parts}
    share = sum(sizes.values()) // (lanes * _UNITS)
    limit = max(_MIN_UNIT_BYTES, min(_MAX_UNIT_BYTES, share))
    units: list[TextUnit] = []
    for part in parts:
        pieces = part.split(limit)
        if len(pieces) > 1 or not part.path.endswith((*COMPRESSIONS, ".parquet")):
            units += [TextUnit(piece) for piece in pieces]
            continue
        stride = min(lanes, -(-sizes[part.path] // limit))
        units += [TextUnit(part, first, stride) for first in range(stride)]
    return units


def _text_bytes(part: FileRange) -> int:
    return part.bytes * (_EXPANSION if part.path.endswith(COMPRESSIONS) else 1)


def hash_division(parts: list[FileRange], lanes: int) -> str:
    """Hash of the names and sizes of the files, and of how they are divided."""
    digest = xxhash.xxh3_128(f"text {lanes} {_UNITS} {_MIN_UNIT_BYTES} {_MAX_UNIT_BYTES}".encode())
    for part in parts:
        digest.update(f" {part.path.rpartition('/')[2]} {part.file_bytes}".encode())
    return digest.hexdigest()


def hash_file_samples(parts: list[FileRange]) -> str | None:
    """Hash of sampled blocks of the files; None for URLs."""
    if any(is_data_url(part.path) for part in parts):
        return None
    samples = " ".join(hash_sampled_blocks(Path(part.path)) for part in parts)
    return xxhash.xxh3_128_hexdigest(samples.encode())
