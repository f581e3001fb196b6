"""A data format for tests: the ids of a one-dimensional .npy file."""

from __future__ import annotations

import numpy as np
import xxhash

from titanlite.data import CorpusChecks, TokenSource
from titanlite.data.open_files import OpenFiles
from titanlite.errors import DataError


class NpySource(TokenSource):
    """Token ids in a .npy file [N], memory-mapped."""

    def __init__(self, path: str):
        try:
            self._ids = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise DataError(f"{path}: is not a .npy file ({error}).") from None
        if self._ids.ndim != 1 or self._ids.dtype.kind not in "iu":
            raise DataError(
                f"{path}: has the shape {self._ids.shape} and the type {self._ids.dtype}.",
                fix="Save a one-dimensional array of integers.",
            )
        self.tokens = self._ids.size
        self.fingerprint = xxhash.xxh3_128_hexdigest(self._ids)

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        return self._ids[starts[:, None] + np.arange(count)].astype(np.int64)


def open_npy(path: str, checks: CorpusChecks, files: OpenFiles) -> TokenSource:
    return NpySource(path)
