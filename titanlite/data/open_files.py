"""Files of shards, opened when they are read, and never more than the process may have open."""

from __future__ import annotations

import os
import resource
import stat
from functools import lru_cache

from titanlite.errors import DataError

LEAST_OPEN = 8  # even where fewer descriptors are left: without them nothing could be read


class OpenFiles:
    """Open files by path; the least recently used are closed when there are too many.

    A process may have few descriptors (`ulimit -n`, often 1,024) and a corpus many shards. Files
    are read by position and not mapped: a file that is cut short or a disk that fails while it is
    read is an error with its name, where a mapping would end the process with SIGBUS.
    """

    def __init__(self, most: int | None = None):
        """`most`: the number of files to keep open; half of the descriptors if not given."""
        self._most, self._expected = most, 0
        self._open = lru_cache(most or LEAST_OPEN)(_OpenFile)  # closed with the last reference

    def expect(self, files: int) -> None:
        """Make room for so many files more."""
        self._expected += files
        if self._most is None:
            room = _descriptors(2 * self._expected) // 2
            self._open = lru_cache(max(LEAST_OPEN, min(self._expected, room)))(_OpenFile)

    def read(self, path: str, size: int, offset: int, out: memoryview) -> None:
        """Fill the bytes `out` from byte `offset` of a file of `size` bytes; raises DataError."""
        try:
            file = self._open(path, size)
            count = os.preadv(file.descriptor, [out], offset)
            while count < len(out):
                more = os.preadv(file.descriptor, [out[count:]], offset + count)
                if more == 0:
                    raise DataError(
                        f"{path}: became shorter while it was read.",
                        fix="Restore the file; do not change a corpus that a run reads.",
                    )
                count += more
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None


class _OpenFile:
    """A descriptor that is closed with its last reference."""

    descriptor = -1

    def __init__(self, path: str, size: int):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise DataError(
                f"{path}: has {status.st_size} bytes, and had {size} when this run started.",
                fix="Restore the file; do not change a corpus that a run reads.",
            )

    def __del__(self):
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _descriptors(wanted: int) -> int:
    """How many descriptors this process may have, after raising its soft limit where it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if soft == infinite:
        return wanted
    raised = wanted if hard == infinite else min(wanted, hard)
    if raised > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):  # a sandbox may forbid it
            pass
    return soft
