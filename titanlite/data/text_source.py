"""A source of text that is tokenized while a run reads it: format = "text".

Sample n of the source belongs to lane n modulo the number of lanes. What a lane gives is a function
of the files, the tokenizer and the settings alone. So the position of a run determines its samples,
and each rank tokenizes the lanes of its own samples only. Where a lane continues cannot be
computed without tokenizing all before it, so a checkpoint records it: five integers per lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np

from titanlite.data.lanes import (
    Lane,
    LaneState,
    assign_units_to_lanes,
    divide_files,
    hash_division,
    hash_file_samples,
)
from titanlite.data.text import list_file_ranges
from titanlite.data.text_files import UNKNOWN_END, find_files
from titanlite.data.token_source import CorpusChecks
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import CheckpointError, DataError

_NEAR_SAMPLES = 256

LanePositions = dict[str, tuple[int, LaneState]]  # lane -> index of a sample, and its state


class TextSource:
    """The samples of text files by number; `lanes` lanes take turns to produce them."""

    def __init__(
        self,
        path: str,
        lanes: int,
        sample_ids: int,
        seed: str,
        encode: Callable[[str], np.ndarray],
        checks: CorpusChecks,
    ):
        """`sample_ids`: ids of a sample. `encode`: ids of a document, with BOS and EOS."""
        files = find_files([path])
        parts = [part for part in list_file_ranges(files) if part.bytes or part.end == UNKNOWN_END]
        if not parts:
            raise DataError(f"{path}: contains no text.")
        self.fingerprint = hash_division(parts, lanes)
        self.content_sample = hash_file_samples(parts) if checks.verify != "off" else None
        units_of_lanes = assign_units_to_lanes(divide_files(parts, lanes), lanes)
        self._sample_ids, self._lock = sample_ids, Lock()
        self._lanes = [
            Lane(units, f"{seed} lane {number}", encode, sample_ids, path)
            for number, units in enumerate(units_of_lanes)
        ]

    def read(self, samples: np.ndarray) -> np.ndarray:
        """Samples by number: int64 [len(samples), ids]; raises DataError."""
        out = np.empty((len(samples), self._sample_ids), dtype=np.int64)
        lanes, indices = samples % len(self._lanes), samples // len(self._lanes)
        kept = 8 * max(Counter(lanes.tolist()).values(), default=0)  # states of several batches
        with self._lock:  # a batch may be written to a file while the next one is read
            for row, lane, index in zip(out, lanes.tolist(), indices.tolist(), strict=True):
                row[:] = self._lanes[lane].read(index, kept)
        return out

    def is_near(self, sample: int) -> bool:
        """Whether a lane need not tokenize many samples before `sample` to read it."""
        index, number = divmod(sample, len(self._lanes))
        with self._lock:
            return index - self._lanes[number].state_at(index)[0] <= _NEAR_SAMPLES

    def positions(self, samples: int) -> LanePositions:
        """Where each lane is after the first `samples` samples, as far as this process knows."""
        count = len(self._lanes)
        with self._lock:
            return {
                str(number): lane.state_at(-(-(samples - number) // count))
                for number, lane in enumerate(self._lanes)
            }

    def restore(self, positions: Any) -> None:
        """Continue from merged `positions`; raises CheckpointError if they are not valid."""
        with self._lock:
            for number, lane in enumerate(self._lanes):
                try:
                    index, state = positions.get(str(number), (0, None))
                    if state is None:
                        continue
                    keys = ("epoch", "unit", "document", "token")
                    checked = {key: _not_negative(state[key]) for key in keys}
                    lane.restore(_not_negative(index), checked)
                except (TypeError, ValueError, KeyError, AttributeError):
                    raise CheckpointError(
                        f"the checkpoint's state of lane {number} of a text source is not valid."
                    ).mark_on_all_ranks() from None


def merge_positions(by_rank: list[dict[str, LanePositions]]) -> dict[str, LanePositions]:
    """The furthest known state of each lane of each source, over all ranks."""
    merged: dict[str, LanePositions] = {}
    for sources in by_rank:
        for name, lanes in sources.items():
            best = merged.setdefault(name, {})
            for lane, known in lanes.items():
                if lane not in best or known[0] > best[lane][0]:
                    best[lane] = known
    return merged


def document_encoder(tokenizer: Tokenizer, bos: bool) -> Callable[[str], np.ndarray]:
    """A function that gives the ids of a document as prepared shards have them."""
    begin = np.array([tokenizer.bos_id] if bos else [], dtype=np.int64)
    end = np.array([tokenizer.eos_id], dtype=np.int64)
    return lambda text: np.concatenate((begin, tokenizer.encode_array(text), end))


def _not_negative(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(value)
    return value
