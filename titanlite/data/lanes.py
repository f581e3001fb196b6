"""Lanes of text: each tokenizes its part of the files in order, and can start at any document.

The number of lanes is a setting, so it does not depend on the number of ranks. A lane is a chain of
nodes of torchdata, whose state is four integers: epoch, unit, document and token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torchdata.nodes import BaseNode  # type: ignore[import-untyped]

from titanlite.data.manifest import hash_sampled_blocks
from titanlite.data.random_bits import GOLDEN, hash_key, mix
from titanlite.data.text import COMPRESSIONS, read_documents
from titanlite.data.text_files import FileRange
from titanlite.data.urls import is_data_url
from titanlite.errors import DataError

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
    """The units of each lane, which have nearly equal bytes; few units make fewer lanes."""
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
    sizes = {
        part.path: part.bytes * (_EXPANSION if part.path.endswith(COMPRESSIONS) else 1)
        for part in parts
    }
    share = sum(sizes.values()) // (lanes * _UNITS)
    limit = max(_MIN_UNIT_BYTES, min(_MAX_UNIT_BYTES, share))
    units: list[TextUnit] = []
    for part in parts:
        pieces = part.split(limit)
        if len(pieces) > 1 or not part.path.endswith((*COMPRESSIONS, ".parquet")):
            units += [TextUnit(piece) for piece in pieces]
            continue
        stride = max(1, min(lanes, -(-sizes[part.path] // limit)))
        units += [TextUnit(part, first, stride) for first in range(stride)]
    return units


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


_MIN_KEPT_STATES = 64  # of a lane: those before its last samples

_START: LaneState = {"epoch": 0, "unit": 0, "document": 0, "token": 0}


class DocumentNode(BaseNode[np.ndarray]):
    """The ids of a lane's documents, epoch after epoch; each epoch has another order of units."""

    def __init__(
        self,
        units: Sequence[TextUnit],
        key: np.ndarray,
        encode: Callable[[str], np.ndarray],
        label: str,
    ):
        super().__init__()
        self._units, self._key, self._encode, self._label = units, key, encode, label
        self._epoch = self._unit = self._document = 0
        self._reader: Iterator[str] | None = None
        self._found = False  # a document in this epoch

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start at a document; those before it in its unit are read and dropped."""
        super().reset(initial_state)
        state = initial_state or _START
        self._epoch, self._unit = state["epoch"], state["unit"]
        self._document, self._reader = state["document"], None
        self._order = self._order_units()
        self._found = self._unit > 0 or self._document > 0

    def next(self) -> np.ndarray:
        """The ids of the next document; raises DataError."""
        while True:
            if self._reader is None:
                unit = self._units[self._order[self._unit]]
                self._reader = islice(unit.documents(), self._document, None)
            text = next(self._reader, None)
            if text is not None:
                self._document, self._found = self._document + 1, True
                return self._encode(text)
            self._reader, self._unit, self._document = None, self._unit + 1, 0
            if self._unit == len(self._units):
                if not self._found:
                    raise DataError(
                        f"{self._label}: one of its lanes has no document.",
                        fix="Check that the files have text, or set a smaller `lanes`.",
                    )
                self._epoch, self._unit, self._found = self._epoch + 1, 0, False
                self._order = self._order_units()

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "unit": self._unit, "document": self._document}

    def _order_units(self) -> list[int]:
        counters = np.arange(1, len(self._units) + 1, dtype=np.uint64) * GOLDEN
        keys = mix(mix(self._key + np.array([self._epoch], np.uint64) * GOLDEN) + counters)
        return np.argsort(keys, kind="stable").tolist()


class SampleNode(BaseNode[np.ndarray]):
    """Windows of `length` ids over the documents; each begins with the last id of the previous."""

    def __init__(self, documents: BaseNode[np.ndarray], length: int):
        super().__init__()
        self._documents, self._length = documents, length
        self._parts: deque[tuple[np.ndarray, dict[str, Any]]] = deque()  # ids, state before them
        self._token = 0  # index in the first part of the id that the next window begins with
        self._available = 0  # ids in the parts from that one on

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Start at a token of a document."""
        super().reset(initial_state)
        state = dict(initial_state or _START)
        self._token = state.pop("token")
        self._documents.reset(state)
        self._parts.clear()
        self._available = -self._token

    def next(self) -> np.ndarray:
        """The next window: int64 [length]."""
        while self._available < self._length:
            self._fetch()
        window = np.empty(self._length, dtype=np.int64)
        done, token = 0, self._token
        for ids, _ in self._parts:
            part = ids[token : token + self._length - done]
            window[done : done + len(part)] = part
            done, token = done + len(part), 0
            if done == self._length:
                break
        self._skip(self._length - 1)
        return window

    def get_state(self) -> dict[str, Any]:
        while self._available < 1:
            self._fetch()
        return {**self._parts[0][1], "token": self._token}

    def _fetch(self) -> None:
        before = self._documents.state_dict()
        ids = next(self._documents)
        self._parts.append((ids, before))
        self._available += len(ids)

    def _skip(self, count: int) -> None:
        self._token += count
        self._available -= count
        while self._parts and self._token >= len(self._parts[0][0]):
            self._token -= len(self._parts[0][0])
            self._parts.popleft()


class Lane:
    """The samples of one lane by index; fast in order, and for going back by a few samples."""

    def __init__(
        self,
        units: Sequence[TextUnit],
        seed: str,
        encode: Callable[[str], np.ndarray],
        length: int,
        label: str,
    ):
        """`length`: ids of a sample. `label` names the source in errors."""
        documents = DocumentNode(units, hash_key(seed), encode, label)
        self._samples = SampleNode(documents, length)
        self._next: int | None = None  # index of the sample that the nodes give next
        self._states: deque[tuple[int, LaneState]] = deque([(0, _START)])

    def read(self, index: int, keep: int = 0) -> np.ndarray:
        """Sample `index`: int64 [length]; raises DataError. Keeps at least `keep` states."""
        if self._next is None or index < self._next:
            self._next, state = self.state_at(index)  # the last known one
            self._samples.reset(state)
        while True:
            if self._next > self._states[-1][0]:
                self._states.append((self._next, self._samples.state_dict()))
            sample = next(self._samples)
            self._next += 1
            if self._next > index:
                break
        while len(self._states) > max(_MIN_KEPT_STATES, keep):
            self._states.popleft()
        return sample

    def state_at(self, index: int) -> tuple[int, LaneState]:
        """The index and the state of the last sample up to `index` whose state is known."""
        if self._next == index:
            return index, self._samples.state_dict()
        return next((known for known in reversed(self._states) if known[0] <= index), (0, _START))

    def restore(self, index: int, state: LaneState) -> None:
        """Continue from the state of sample `index`."""
        self._next = None
        self._states = deque([(index, state)])
