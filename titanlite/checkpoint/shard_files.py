"""Read tensors from DCP's shard files (`*.distcp`), without torch.load.

DCP writes each chunk as `torch.save` does: a zip archive in which `data/0` holds the elements as
they are in memory, and `data.pkl` describes one contiguous tensor. `data.pkl` is never opened,
because the manifest has its information. An archive is accepted only if its `data/0` is not
compressed and has exactly the size of the chunk. Only the requested rows are read.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.checkpoint.chunks import Chunk
from titanlite.storage import BinaryReader

BUFFER_BYTES = 1 << 26  # most bytes of one read, and of a buffer of rows before they are converted

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # section 4.3.7 of the format's APPNOTE.TXT
_TAIL_BYTES = 4096  # of an archive, with its directory: one of seven entries has 500
_CRC_OF_LITTLE = zlib.crc32(b"little")  # content of the archive's entry `byteorder`


def read_part_of_chunk(
    stream: BinaryReader,
    chunk: Chunk,
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: Tensor,
) -> None:
    """Fill `target` with the part of a chunk that begins at `offsets` within the chunk.

    Raises ValueError if the archive is truncated, or not as DCP writes one.
    """
    sizes, lengths = chunk.sizes or (1,), tuple(target.shape) or (1,)
    offsets, target = tuple(offsets) or (0,), target.reshape(1) if target.dim() == 0 else target
    row_bytes = dtype.itemsize * math.prod(sizes[1:])
    begin = find_elements(stream, chunk, row_bytes * sizes[0]) + offsets[0] * row_bytes
    rows_as_saved = lengths[1:] == sizes[1:] and target.dtype == dtype
    if rows_as_saved and target.device.type == "cpu" and target.is_contiguous():
        _read_into_tensor(stream, begin, target)
        return
    columns = [slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True)]
    wanted = (slice(None), *columns)
    buffer_rows = max(1, BUFFER_BYTES // row_bytes)
    for first in range(0, lengths[0], buffer_rows):
        buffer = torch.empty((min(buffer_rows, lengths[0] - first), *sizes[1:]), dtype=dtype)
        _read_into_tensor(stream, begin + first * row_bytes, buffer)
        target[first : first + len(buffer)].copy_(buffer[wanted])


def find_elements(stream: BinaryReader, chunk: Chunk, element_bytes: int) -> int:
    """The position in the file of a chunk's elements, which have `element_bytes` bytes in total."""
    tail_bytes = min(chunk.length, _TAIL_BYTES)
    tail = _read_exactly(stream, chunk.start + chunk.length - tail_bytes, tail_bytes)
    header = _find_local_header(_ArchiveTail(tail, chunk.length), element_bytes)
    local = _read_exactly(stream, chunk.start + header, _LOCAL_HEADER.size)
    signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local)
    begin = header + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or begin + element_bytes > chunk.length:
        raise ValueError("its elements are not inside its archive")
    return chunk.start + begin


class _ArchiveTail(io.BytesIO):
    """The last bytes of an archive at their positions in it; what is before them cannot be read."""

    def __init__(self, tail: bytes, archive_bytes: int):
        super().__init__(tail)
        self.before = archive_bytes - len(tail)

    def seek(self, position: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET:
            position -= self.before  # negative: refused by BytesIO
        return super().seek(position, whence) + self.before

    def tell(self) -> int:
        return super().tell() + self.before


def _find_local_header(tail: _ArchiveTail, element_bytes: int) -> int:
    """The position in an archive of the local header of `data/0`, from the archive's `tail`."""
    try:
        with zipfile.ZipFile(tail) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise ValueError(f"it is not an archive of torch.save: {error}") from None
    if any(e.filename.endswith("/byteorder") and e.CRC != _CRC_OF_LITTLE for e in entries):
        raise ValueError("its numbers are not little-endian")
    data = [entry for entry in entries if "/data/" in entry.filename]
    found = [
        (e.filename.rpartition("/data/")[2], e.compress_type, e.compress_size, e.file_size)
        for e in data
    ]
    if found != [("0", zipfile.ZIP_STORED, element_bytes, element_bytes)]:
        raise ValueError(
            f"its archive needs exactly one uncompressed data/ entry, of {element_bytes} bytes"
        )
    return data[0].header_offset


def _read_exactly(stream: BinaryReader, begin: int, size: int) -> bytes:
    stream.seek(begin)
    content = stream.read(size)
    if len(content) != size:
        raise ValueError("its file is truncated")
    return content


def _read_into_tensor(stream: BinaryReader, begin: int, target: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from position `begin` on."""
    left = target.view(-1).view(torch.uint8).numpy().data
    stream.seek(begin)
    while left:
        count = stream.readinto(left[:BUFFER_BYTES])
        if not count:
            raise ValueError("its file is truncated")
        left = left[count:]
