"""Disk space for offloaded tensors, which one thread reads and writes past the page cache."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from titanlite.distributed.host_memory import HostMemory, PinnedMemory
from titanlite.errors import UserError
from titanlite.log import logger
from titanlite.threads import open_thread_pool

MIN_GB_PER_S = 0.2  # a slower disk is refused: 1B parameters with Adam would take 80 s a step
PIECE_BYTES = 32 << 20  # of one transfer; a multiple of PAGE
PAGE = 4096  # alignment of memory and file offsets that O_DIRECT needs


class DiskFile:
    """Space in a folder, of a file that never has a name: a crash leaves nothing of it."""

    def __init__(self, folder: str, nbytes: int):
        """Reserve `nbytes`, a multiple of PAGE. Raises UserError if the disk has no space."""
        self.number, self.nbytes, self._is_direct = -1, nbytes, False
        try:
            self.number = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            if nbytes > free_bytes(folder):  # fallocate would fill the disk first
                raise OSError(errno.ENOSPC, "")
            os.posix_fallocate(self.number, 0, nbytes)
        except OSError as error:
            raise _offload_error(folder, nbytes, error) from error
        with suppress(OSError):  # a file system that has no O_DIRECT
            fcntl.fcntl(self.number, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
            self._is_direct = True

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)

    def transfer(self, memory: memoryview, offset: int, writes: bool) -> None:
        """Read or write whole pages; none of them stays in the page cache. Raises OSError."""
        move = os.pwritev if writes else os.preadv
        if move(self.number, [memory], offset) != len(memory):
            raise OSError(errno.EIO, "the file ended early")
        if not self._is_direct:
            os.fdatasync(self.number)  # only pages that are on the disk can be dropped
            os.posix_fadvise(self.number, offset, len(memory), os.POSIX_FADV_DONTNEED)


class FileMemory(HostMemory):
    """The bytes of a file as memory: for checkpoints, which need tensors."""

    def __new__(cls, file: DiskFile) -> FileMemory:
        return mmap.mmap.__new__(cls, file.number, file.nbytes)

    def __init__(self, file: DiskFile):
        self._file, self._address = file, torch.frombuffer(self, dtype=torch.uint8).data_ptr()

    def offset_of(self, tensor: Tensor) -> int:
        """The first byte in the file of a tensor in this memory."""
        return tensor.data_ptr() - self._address

    def drop_pages(self) -> None:
        """Write changed pages, and free all; not every file system does so before O_DIRECT."""
        self.flush()
        self.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file.number, 0, 0, os.POSIX_FADV_DONTNEED)


class DiskThread:
    """Reads and writes files in the order of the calls, through one buffer of PIECE_BYTES.

    So a read after a write of the same bytes gets them. After an error of the disk, all later
    calls fail with it.
    """

    def __init__(self, folder: str, device_type: str, purpose: str):
        """Raises UserError if the folder cannot be used, or is slower than MIN_GB_PER_S."""
        self._error: UserError | None = None
        self._device: Any = torch.get_device_module(device_type)
        self._stream, self._pool = self._device.Stream(), open_thread_pool(1)
        self._memory: HostMemory = (
            PinnedMemory(PIECE_BYTES, 'offload_folder = ""')
            if device_type == "cuda"
            else HostMemory(PIECE_BYTES)
        )
        self._buffer = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._folder = folder
        speeds = measure_gb_per_s(self, folder)
        text = f"{folder}: writes {speeds[0]:.2f} GB/s, reads {speeds[1]:.2f} GB/s"
        if min(speeds) < MIN_GB_PER_S:
            raise UserError(
                f"offload_folder = {text} on this rank, but at least {MIN_GB_PER_S} are needed.",
                fix='Use a folder on a local NVMe disk, or host memory: offload_folder = "".',
            )
        logger.info("offload    %s in %s; buffer %d MiB", purpose, text, PIECE_BYTES >> 20)

    def transfer(
        self, file: DiskFile, parts: Iterable[tuple[int, Tensor]], writes: bool
    ) -> Future[None]:
        """Write tensors at byte offsets of a file, or read into them.

        Starts when the device has computed what is enqueued now.
        """
        ready = self._device.current_stream().record_event()
        return self._pool.submit(self._run, file, list(parts), writes, ready)

    @torch.no_grad()
    def _run(
        self, file: DiskFile, parts: list[tuple[int, Tensor]], writes: bool, ready: Any
    ) -> None:
        if self._error is not None:
            raise self._error
        with self._device.stream(self._stream):
            if ready is not None:  # a CPU has no events
                self._stream.wait_event(ready)
            for offset, tensor in parts:
                for part in bytes_of(tensor).split(PIECE_BYTES):
                    self._transfer_piece(file, offset, part, writes)
                    offset += len(part)

    def _transfer_piece(self, file: DiskFile, offset: int, part: Tensor, writes: bool) -> None:
        buffer = self._buffer[: len(part)]
        if writes:
            buffer.copy_(part)  # waits for the device
        try:
            file.transfer(memoryview(self._memory)[: in_pages(len(part))], offset, writes)
        except OSError as error:
            self._error = _offload_error(self._folder, file.nbytes, error)
            raise self._error from error
        if not writes:
            part.copy_(buffer)


def measure_gb_per_s(disk: DiskThread, folder: str) -> tuple[float, float]:
    """Bandwidth of a write and of a read of PIECE_BYTES; the first write only warms up."""
    file, piece = DiskFile(folder, PIECE_BYTES), [(0, torch.ones(PIECE_BYTES, dtype=torch.uint8))]
    times = []
    for writes in (True, True, False):
        disk.transfer(file, piece, writes).result()
        times.append(time.monotonic())
    return PIECE_BYTES / 1e9 / (times[1] - times[0]), PIECE_BYTES / 1e9 / (times[2] - times[1])


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes from the first element of a tensor to its last, also those between elements."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,)).view(torch.uint8)


def in_pages(nbytes: int) -> int:
    """The bytes of the pages that `nbytes` need."""
    return -(-nbytes // PAGE) * PAGE


def free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _offload_error(folder: str, nbytes: int, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"offload_folder = {folder}: {nbytes:,} bytes are needed on this rank, and"
            f" {free_bytes(folder):,} are free.",
            fix="Free disk space, or use another folder or more ranks.",
        )
    return UserError(
        f"offload_folder = {folder}: {error.strerror}.",
        fix="Use a folder on a local disk that exists and can be written.",
    )
