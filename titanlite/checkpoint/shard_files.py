"""Read tensors from DCP's shard files (`*.distcp`), without torch.load.

DCP writes each chunk as `torch.save` does: a zip archive in which `data/0` holds the elements as
they are in memory, and `data.pkl` describes one contiguous tensor. `data.pkl` is never opened,
because the manifest has its information. An archive is accepted only if its `data/0` is not
compressed and has exactly the size of the chunk. Only the requested rows are read.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.checkpoint.chunks import Chunk
from titanlite.storage import BinaryReader

BUFFER_BYTES = 1 << 26  # most bytes of one read, and of a buffer of rows before they are converted

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7, 4.3.12, 4.3.14 to 4.3.16
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DIRECTORY_ENTRY = struct.Struct("<4s6H3I5H2I")
_ZIP64_END = struct.Struct("<4sQ2H2I4Q")  # zip64's end of the central directory
_ZIP64_LOCATOR_SIGNATURE, _END_SIGNATURE = b"PK\x06\x07", b"PK\x05\x06"
_END_RECORDS_BYTES = _ZIP64_END.size + 20 + 22  # all three records at the end of an archive
_TAIL_BYTES = 4096  # a central directory of seven entries has 500
_CRC_OF_LITTLE = zlib.crc32(b"little")  # content of the archive's entry `byteorder`
_IN_ZIP64_FIELD = 0xFFFFFFFF  # the number is too large for its field, and is in the zip64 field


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
    header = _find_local_header(tail, chunk.length, element_bytes)
    local = _read_exactly(stream, chunk.start + header, _LOCAL_HEADER.size)
    signature, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local)
    begin = header + _LOCAL_HEADER.size + name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or begin + element_bytes > chunk.length:
        raise ValueError("its elements are not inside its archive")
    return chunk.start + begin


def _find_local_header(tail: bytes, archive_bytes: int, element_bytes: int) -> int:
    """The position in an archive of the local header of `data/0`, from the archive's `tail`."""
    signatures = (tail[-42:-38], tail[-22:-18])
    if len(tail) < _END_RECORDS_BYTES or signatures != (_ZIP64_LOCATOR_SIGNATURE, _END_SIGNATURE):
        raise ValueError("it is not an archive of torch.save")
    signature, *_, count, directory_bytes, directory = _ZIP64_END.unpack(
        tail[-_END_RECORDS_BYTES:-42]
    )
    inside = (
        directory_bytes <= len(tail) - _END_RECORDS_BYTES
        and directory + directory_bytes == archive_bytes - _END_RECORDS_BYTES
    )
    if signature != b"PK\x06\x06" or not inside or count > 64:
        raise ValueError("the directory of its archive is not at the end")
    entries = tail[len(tail) - _END_RECORDS_BYTES - directory_bytes : -_END_RECORDS_BYTES]
    data_entries, position = [], 0
    for _ in range(count):
        if len(entries) < position + _DIRECTORY_ENTRY.size:
            raise ValueError("the directory of its archive is truncated")
        fields = _DIRECTORY_ENTRY.unpack_from(entries, position)
        signature, method, crc, packed, unpacked, header = (fields[i] for i in (0, 4, 7, 8, 9, 16))
        name_end = position + _DIRECTORY_ENTRY.size + fields[10]
        name = entries[position + _DIRECTORY_ENTRY.size : name_end]
        extra = entries[name_end:][: fields[11]]
        position = name_end + fields[11] + fields[12]
        if name.endswith(b"/byteorder") and crc != _CRC_OF_LITTLE:
            raise ValueError("its numbers are not little-endian")
        if b"/data/" in name:
            numbers = _with_zip64_values([unpacked, packed, header], extra)
            data_entries.append((signature, name.rpartition(b"/data/")[2], method, *numbers))
    expected = (b"PK\x01\x02", b"0", 0, element_bytes, element_bytes)
    if [entry[:-1] for entry in data_entries] != [expected]:
        raise ValueError(
            f"its archive needs exactly one uncompressed data/ entry, of {element_bytes} bytes"
        )
    return data_entries[0][-1]


def _with_zip64_values(numbers: list[int], extra: bytes) -> list[int]:
    """Replace values above 4 GiB by those in the zip64 extra field, which has the same order."""
    while len(extra) >= 4 and extra[:2] != b"\x01\x00":
        extra = extra[4 + int.from_bytes(extra[2:4], "little") :]
    values = extra[4:]
    for index, number in enumerate(numbers):
        if number == _IN_ZIP64_FIELD:
            numbers[index], values = int.from_bytes(values[:8], "little"), values[8:]
    return numbers


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
