"""Pool of open shard files, read by position, within the process's limit of file descriptors."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import lru_cache

from titanlite.errors import DataError
from titanlite.files import raise_open_file_limit

MIN_OPEN_FILES = 8  # also if the limit of descriptors allows fewer

FileRequest = tuple[str, int, int, memoryview]  # arguments of `OpenFiles.read`


class OpenFiles:
    """Open files by path; the least recently used ones are closed when there are too many.

    A process may have few descriptors (`ulimit -n`, often 1,024) and a corpus many shards. Files
    are read by position and not memory-mapped: if a file is truncated or its disk fails during a
    read, the error names the file; with a memory mapping, SIGBUS would end the process.
    """

    reads_together = False  # `read_all` is faster than `read` for each, as over a network

    def __init__(self, max_open: int | None = None):
        """`max_open`: files to keep open; None: at most half of the process's descriptors."""
        self._max_open, self._expected = max_open, 0
        # an evicted file is closed when its last reference is gone
        self._open = lru_cache(max_open or MIN_OPEN_FILES)(_OpenFile)

    def expect(self, files: int) -> None:
        """Announce that `files` more files will be read, so that the pool may grow."""
        self._expected += files
        if self._max_open is None:
            size = max(MIN_OPEN_FILES, min(self._expected, raise_open_file_limit() // 2))
            self._open = lru_cache(size)(_OpenFile)

    def read_all(self, requests: Sequence[FileRequest]) -> None:
        """`read` for each request; raises DataError."""
        for request in requests:
            self.read(*request)

    def read(self, path: str, size: int, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset` of a file of `size` bytes; raises DataError."""
        try:
            file = self._open(path, size)
            count = os.preadv(file.descriptor, [out], offset)
            while count < len(out):
                more = os.preadv(file.descriptor, [out[count:]], offset + count)
                if more == 0:
                    raise DataError(
                        f"{path}: became shorter while it was read.",
                        fix="Restore the file; do not change a corpus during a run.",
                    )
                count += more
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None


class _OpenFile:
    """A file descriptor that is closed when the last reference to it is gone."""

    descriptor = -1

    def __init__(self, path: str, size: int):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise DataError(
                f"{path}: has {status.st_size} bytes, and had {size} when this run started.",
                fix="Restore the file; do not change a corpus during a run.",
            )

    def __del__(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)
