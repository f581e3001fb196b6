"""A cache of blocks of remote files on a local disk, which all processes of a machine share.

Each block is a file with a hash of its content at the end. The processes take locks (flock) to
fetch a block only once and to keep the sum of all blocks below the limit.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from titanlite.files import make_private_folder
from titanlite.log import logger

BLOCK_BYTES = 1 << 18
# A request for a sample (tens of KB) takes tens of ms; to transfer a whole block adds little.

_HASH_BYTES = 16
_LOCKS = 64  # that blocks share
_KEPT = 0.9  # of the limit, when blocks are removed


@dataclass(frozen=True)
class CacheLimits:
    """Where blocks are kept, and how many bytes they may have."""

    folder: str = ""  # empty: a folder of this user in the temporary folder
    bytes: int = 8 << 30

    def open_folder(self) -> Path:
        """The folder of the cache, made if needed; raises OSError."""
        folder = Path(self.folder) if self.folder else make_private_folder() / "data"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


BlockName = tuple[str, int]  # key of a file, number of a block in it
FetchBlocks = Callable[[Sequence[BlockName]], Sequence[bytes]]


class BlockCache:
    """Blocks of files by name; the least recently read ones are removed first."""

    _has_warned = False

    def __init__(self, limits: CacheLimits):
        """Raises OSError if the folder cannot be made. A later error only leaves the cache out."""
        self._folder = limits.open_folder()
        self._limit = max(limits.bytes, BLOCK_BYTES + _HASH_BYTES)
        (self._folder / "blocks").mkdir(exist_ok=True)

    def read(self, names: Sequence[BlockName], fetch: FetchBlocks) -> dict[BlockName, bytes]:
        """The content of blocks; `fetch` returns those that are not here."""
        found = {name: content for name in names if (content := self._load(name)) is not None}
        missing = sorted(set(names) - found.keys())
        if not missing:
            return found
        with ExitStack() as stack:
            hashes = (xxhash.xxh3_64_intdigest(str(name).encode()) for name in missing)
            for number in sorted({digest % _LOCKS for digest in hashes}):
                stack.enter_context(self._locked(f"fetch-{number}"))  # in order: no deadlock
            for name in list(missing):
                if (content := self._load(name)) is not None:  # fetched by another process
                    found[name] = content
                    missing.remove(name)
            if missing:
                for name, content in zip(missing, fetch(missing), strict=True):
                    found[name] = content
                    self._store(name, content)
        return found

    def _path(self, name: BlockName) -> Path:
        return self._folder / "blocks" / f"{name[0]}-{name[1]}"

    def _load(self, name: BlockName) -> bytes | None:
        """A block, or None if it is not here, or damaged."""
        path = self._path(name)
        try:
            with open(path, "rb") as file:
                stored = file.read()
                with suppress(OSError):
                    os.utime(file.fileno())  # now is the time of its last reading
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._warn(error)
            return None
        content, digest = stored[:-_HASH_BYTES], stored[-_HASH_BYTES:]
        if xxhash.xxh3_128_digest(content) != digest:
            with suppress(OSError):
                path.unlink()
            return None
        return content

    def _warn(self, error: OSError) -> None:
        """Log the first failure of the cache; blocks are then fetched without it."""
        if not self._has_warned:
            logger.warning("%s: the cache cannot be used (%s)", self._folder, error.strerror)
        self._has_warned = True

    def _store(self, name: BlockName, content: bytes) -> None:
        """Write a block, and remove others first if there are too many."""
        size = len(content) + _HASH_BYTES
        with self._locked("size"), self._warned_errors():
            total = self._recorded_bytes() + size
            if total > self._limit:
                total = self._remove_oldest(self._limit * _KEPT - size) + size
            # recorded first: after a crash the record is too large, until blocks are removed again
            (self._folder / "bytes").write_text(str(total))
            path = self._path(name)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            try:
                temporary.write_bytes(content + xxhash.xxh3_128_digest(content))
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise

    @contextmanager
    def _warned_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._warn(error)

    def _recorded_bytes(self) -> int:
        """The bytes of all blocks, as the process that wrote the last one recorded them."""
        try:
            return int((self._folder / "bytes").read_text())
        except (FileNotFoundError, ValueError):
            return self._limit  # so that they are counted

    def _remove_oldest(self, allowed: float) -> int:
        """Remove blocks until the others have at most `allowed` bytes; returns their bytes."""
        entries = []
        for entry in os.scandir(self._folder / "blocks"):
            with suppress(FileNotFoundError):
                status = entry.stat()
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= allowed:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold a lock; nothing is held if the folder fails."""
        with ExitStack() as stack:
            with self._warned_errors():
                flags = os.O_CREAT | os.O_RDWR
                descriptor = os.open(self._folder / f"{name}.lock", flags, 0o600)
                stack.callback(os.close, descriptor)  # releases the lock
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
