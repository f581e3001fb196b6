"""Tensors out of the files that DCP writes, without torch.load.

DCP writes each chunk as `torch.save` does: a zip archive, in which `data/0` holds the elements as
they are in memory and `data.pkl` says what is known already: that it is one contiguous tensor.
Only an archive whose `data/0` is not compressed and has exactly the bytes of the chunk is read, and
of that only the rows that are asked for; `data.pkl` is never opened.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import IO

import torch
from torch import Tensor

from titanlite.checkpoint.chunks import Chunk

BLOCK_BYTES = 1 << 26  # at once, where elements cannot go straight to where they belong

# https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3.7, 4.3.12, 4.3.14 to 4.3.16
_FILE = struct.Struct("<4s5H3I2H")  # local header
_ENTRY = struct.Struct("<4s6H3I5H2I")  # of the central directory
_END = struct.Struct("<4sQ2H2I4Q")  # zip64's end of the central directory
_LOCATOR, _LAST = b"PK\x06\x07", b"PK\x05\x06"
_ENDS = _END.size + 20 + 22  # all three records at the end of an archive
_TAIL_BYTES = 4096  # a central directory of seven entries has 500
_LITTLE_ENDIAN = zlib.crc32(b"little")
_FULL = 0xFFFFFFFF  # the number is too large, and is in the zip64 field


def read_part(
    stream: IO[bytes],
    chunk: Chunk,
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: Tensor,
) -> None:
    """Fill `target` with the part of a chunk that begins at `offsets` in it.

    Raises ValueError where the archive is not as DCP writes one, or is cut short.
    """
    sizes, lengths = chunk.sizes or (1,), tuple(target.shape) or (1,)
    offsets, target = tuple(offsets) or (0,), target.reshape(1) if target.dim() == 0 else target
    row = dtype.itemsize * math.prod(sizes[1:])
    begin = find_elements(stream, chunk, row * sizes[0]) + offsets[0] * row
    rows_as_saved = lengths[1:] == sizes[1:] and target.dtype == dtype
    if rows_as_saved and target.device.type == "cpu" and target.is_contiguous():
        _read_into(stream, begin, target)
        return
    columns = tuple(slice(o, o + n) for o, n in zip(offsets[1:], lengths[1:], strict=True))
    at_once = max(1, BLOCK_BYTES // row)
    for first in range(0, lengths[0], at_once):
        block = torch.empty((min(at_once, lengths[0] - first), *sizes[1:]), dtype=dtype)
        _read_into(stream, begin + first * row, block)
        target[first : first + len(block)].copy_(block[(slice(None), *columns)])


def find_elements(stream: IO[bytes], chunk: Chunk, size: int) -> int:
    """Where in the file the elements of a chunk begin, which are `size` bytes."""
    tail_bytes = min(chunk.length, _TAIL_BYTES)
    tail = _read(stream, chunk.start + chunk.length - tail_bytes, tail_bytes)
    header = _local_header(tail, chunk.length, size)
    local = _read(stream, chunk.start + header, _FILE.size)
    signature, *_, name_bytes, extra_bytes = _FILE.unpack(local)
    begin = header + _FILE.size + name_bytes + extra_bytes
    if signature != b"PK\x03\x04" or begin + size > chunk.length:
        raise ValueError("its elements are not inside its archive")
    return chunk.start + begin


def _local_header(tail: bytes, length: int, size: int) -> int:
    """Where in an archive the header of `data/0` is, by the end of the archive."""
    if len(tail) < _ENDS or tail[-42:-38] != _LOCATOR or tail[-22:-18] != _LAST:
        raise ValueError("it is no archive of torch.save")
    signature, *_, count, directory_bytes, directory = _END.unpack(tail[-_ENDS:-42])
    inside = directory_bytes <= len(tail) - _ENDS and directory + directory_bytes == length - _ENDS
    if signature != b"PK\x06\x06" or not inside or count > 64:
        raise ValueError("the directory of its archive is not at the end")
    entries = tail[len(tail) - _ENDS - directory_bytes : -_ENDS]
    found, at = [], 0
    for _ in range(count):
        if len(entries) < at + _ENTRY.size:
            raise ValueError("the directory of its archive is cut short")
        fields = _ENTRY.unpack_from(entries, at)
        signature, method, crc, packed, plain, header = (fields[i] for i in (0, 4, 7, 8, 9, 16))
        name_end = at + _ENTRY.size + fields[10]
        name, extra = entries[at + _ENTRY.size : name_end], entries[name_end:][: fields[11]]
        at = name_end + fields[11] + fields[12]
        if name.endswith(b"/byteorder") and crc != _LITTLE_ENDIAN:
            raise ValueError("its numbers are not little-endian")
        if b"/data/" in name:
            numbers = _whole_numbers([plain, packed, header], extra)
            found.append((signature, name.rpartition(b"/data/")[2], method, *numbers))
    if [entry[:-1] for entry in found] != [(b"PK\x01\x02", b"0", 0, size, size)]:
        raise ValueError(f"its archive does not hold its {size} bytes alone, and uncompressed")
    return found[0][-1]


def _whole_numbers(numbers: list[int], extra: bytes) -> list[int]:
    """Sizes and places above 4 GiB are in the extra field of zip64, in this order."""
    while len(extra) >= 4 and extra[:2] != b"\x01\x00":
        extra = extra[4 + int.from_bytes(extra[2:4], "little") :]
    wide = extra[4:]
    for position, number in enumerate(numbers):
        if number == _FULL:
            numbers[position], wide = int.from_bytes(wide[:8], "little"), wide[8:]
    return numbers


def _read(stream: IO[bytes], begin: int, size: int) -> bytes:
    stream.seek(begin)
    content = stream.read(size)
    if len(content) != size:
        raise ValueError("its file is cut short")
    return content


def _read_into(stream: IO[bytes], begin: int, target: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from `begin` on."""
    left = memoryview(target.view(-1).view(torch.uint8).numpy())
    stream.seek(begin)
    while left:
        count = stream.readinto(left[:BLOCK_BYTES])
        if not count:
            raise ValueError("its file is cut short")
        left = left[count:]
