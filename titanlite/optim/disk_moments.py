"""Moments of Adam in a file: each update reads them ahead and writes them behind, in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from titanlite.distributed import disk_memory
from titanlite.distributed.collectives import local_shard
from titanlite.distributed.disk_memory import PAGE, DiskFile, DiskThread, FileMemory, in_pages

AHEAD = 2  # pieces that are read while one is updated; one more is written


class MomentPiece(NamedTuple):
    """Moments of some blocks of a parameter."""

    parameter: nn.Parameter
    blocks: slice  # of elements that share a scale; without scales, elements
    moments: list[Tensor]  # [blocks, ...] of this rank


class DiskMoments:
    """Moments in a file, which checkpoints read and load as memory.

    An update has at most AHEAD + 2 pieces on the device, and one in the buffer of the thread.
    """

    def __init__(self, folder: str, device_type: str, nbytes: int):
        """`nbytes`: the whole pages of all moments of this rank. Raises UserError."""
        purpose = f"{nbytes / 2**30:.2f} GiB of optimizer state of this rank"
        self._disk = DiskThread(folder, device_type, purpose)
        self._file = DiskFile(folder, max(nbytes, PAGE))
        self._memory, self._used = FileMemory(self._file), 0

    def place(self, moment: Tensor) -> None:
        """Replace the memory of a host tensor of zeros by that of the file."""
        self._memory.place(moment, self._used)
        self._used += in_pages(local_shard(moment).nbytes)

    def pieces(self, stored: Iterable[MomentPiece]) -> Iterator[MomentPiece]:
        """Pieces to update in place; `stored` are all blocks of each parameter.

        The changes are in the file when the iteration ends.
        """
        self._memory.drop_pages()
        todo = (piece for moments in stored for piece in _split_moments(moments))
        ahead = deque(map(self._begin_read, islice(todo, AHEAD)))
        done = None
        while ahead:
            piece, offsets, done = ahead.popleft()
            done.result()
            yield piece
            parts = zip(offsets, piece.moments, strict=True)
            done = self._disk.transfer(self._file, parts, writes=True)
            piece.moments.clear()  # the thread frees them
            ahead.extend(map(self._begin_read, islice(todo, 1)))
        if done is not None:
            done.result()

    def _begin_read(self, piece: MomentPiece) -> tuple[MomentPiece, list[int], Future[None]]:
        device = local_shard(piece.parameter).device
        offsets = [self._memory.offset_of(moment) for moment in piece.moments]
        on_device = [torch.empty_like(moment, device=device) for moment in piece.moments]
        parts = zip(offsets, on_device, strict=True)
        read = self._disk.transfer(self._file, parts, writes=False)
        return piece._replace(moments=on_device), offsets, read


def _split_moments(stored: MomentPiece) -> Iterator[MomentPiece]:
    """Pieces of whole pages, of about PIECE_BYTES together."""
    blocks = len(stored.moments[0])
    block_bytes = sum(moment.nbytes for moment in stored.moments) // blocks
    length = max(disk_memory.PIECE_BYTES // block_bytes // PAGE, 1) * PAGE
    for start in range(0, blocks, length):
        part = slice(start, start + length)
        yield MomentPiece(stored.parameter, part, [moment[part] for moment in stored.moments])
