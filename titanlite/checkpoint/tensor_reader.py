"""Read tensors of a checkpoint through torch.distributed.checkpoint (DCP), into any layout.

Nothing is unpickled: neither DCP's `.metadata` nor the pickles in its shard files (`*.distcp`).
DCP writes each chunk as `torch.save` does: a zip archive in which `data/0` holds the elements as
they are in memory, and `data.pkl` describes one contiguous tensor. `data.pkl` is never opened,
because the manifest has its information. An archive is accepted only if its `data/0` is not
compressed and has exactly the size of the chunk. Only the requested rows are read.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.checkpoint.chunks import Chunk, read_chunks, to_dcp_metadata
from titanlite.checkpoint.dcp import (
    BaseStorageReader,
    as_checkpoint_error,
    call_on_all_ranks,
    completed_future,
)
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    damaged_checkpoint,
    read_checkpoint_manifest,
)
from titanlite.checkpoint.model_state import State
from titanlite.errors import CheckpointError
from titanlite.storage import StorageFolder

BUFFER_BYTES = 1 << 26  # most bytes of one read, and of a buffer of rows, or one row, to convert

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # section 4.3.7 of the format's APPNOTE.TXT
_TAIL_BYTES = 4096  # of an archive, with its directory: one of seven entries has 500
_CRC_OF_LITTLE = zlib.crc32(b"little")  # content of the archive's entry `byteorder`


def read_tensors(
    folder: StorageFolder,
    state: State,
    group: dist.ProcessGroup | None = None,
    *,
    reader: StorageReader | None = None,
    no_dist: bool = False,
) -> None:
    """Read a checkpoint into the tensors of `state`, in place, whatever layout saved it.

    Collective over `group`, unless `no_dist` is set or there is no process group. `reader` is for
    folders that are not checkpoints of titanlite. Raises CheckpointError.
    """
    names = [f"{part}.{name}" for part, tensors in state.items() for name in tensors]
    alone = no_dist or not dist.is_initialized()
    lists_files = alone or dist.get_rank() == 0

    def read() -> None:
        # Without DCP's collectives, which would only return to each rank its own plan.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                state,
                storage_reader=reader or _CheckpointReader(folder, names, lists_files),
                planner=_TensorPlanner(),
                no_dist=True,
            )

    if alone:
        with as_checkpoint_error(folder, "read"):
            read()
    else:
        call_on_all_ranks(read, folder, "read", group)


class _TensorPlanner(DefaultLoadPlanner):
    """DCP's planner, but an entry that is not a tensor is an error; DCP would unpickle it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: is not a tensor.")


class _CheckpointReader(BaseStorageReader):
    """Reads the tensors `names` of a checkpoint without unpickling: see chunks.py.

    Raises CheckpointError, before DCP is called, which would raise another error.
    """

    def __init__(self, folder: StorageFolder, names: Sequence[str], lists_files: bool):
        self.folder = folder
        self.manifest = read_checkpoint_manifest(folder, sizes=False, files=lists_files)
        missing = [name for name in names if name not in self.manifest.tensors]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            fix = "Set [model] as it was saved."
            if all(name.startswith("optimizer.") for name in missing):
                fix = (
                    "Set [optimizer] as it was saved, or start its state from scratch:"
                    ' checkpoint.exclude_from_loading = ["optimizer"].'
                )
            raise CheckpointError(
                f"{folder}: does not contain {', '.join(missing[:4])}{more}, which this job has.",
                fix=fix,
            )
        self.chunks = read_chunks(folder, self.manifest, names)

    def read_metadata(self) -> Metadata:
        return to_dcp_metadata(self.manifest, self.chunks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[int, ReadItem, Chunk]]] = {}
        for item in plan.items:
            index = item.storage_index
            chunk = self.chunks[index.fqn][tuple(index.offset or ())]
            by_file.setdefault(chunk.file, []).append((chunk.start, item, chunk))
        for file, parts in by_file.items():
            with self.folder.open_for_reading(file) as stream:
                for _, item, chunk in sorted(parts, key=lambda part: part[0]):
                    self._read_item(stream, item, chunk, planner)
        return completed_future(None)

    def _read_item(
        self, stream: io.BufferedIOBase, item: ReadItem, chunk: Chunk, planner: LoadPlanner
    ) -> None:
        target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
        dtype = DTYPE_OF_NAME[self.manifest.tensors[name].dtype]
        try:
            read_part_of_chunk(stream, chunk, dtype, item.storage_offsets, target)
        except ValueError as error:
            raise damaged_checkpoint(self.folder, f"{name} in {chunk.file}: {error}") from None
        planner.commit_tensor(item, target)


def read_part_of_chunk(
    stream: io.BufferedIOBase,
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


def find_elements(stream: io.BufferedIOBase, chunk: Chunk, element_bytes: int) -> int:
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


def _read_exactly(stream: io.BufferedIOBase, begin: int, size: int) -> bytes:
    stream.seek(begin)
    content = stream.read(size)
    if len(content) != size:
        raise ValueError("its file is truncated")
    return content


def _read_into_tensor(stream: io.BufferedIOBase, begin: int, target: Tensor) -> None:
    """Fill a contiguous tensor with the bytes from position `begin` on."""
    left = target.view(-1).view(torch.uint8).numpy().data
    stream.seek(begin)
    while left:
        count = stream.readinto(left[:BUFFER_BYTES])
        if not count:
            raise ValueError("its file is truncated")
        left = left[count:]
