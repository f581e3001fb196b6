"""Where each chunk of each tensor lies in the files of a checkpoint, as JSON.

DCP keeps this in `.metadata`, a pickle, which we write for its own tools and do not read. A chunk
is the part of a tensor that one rank has written. `chunks.json` is a file of its own, because the
manifest is read at every save, and thousands of ranks have millions of chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.inert_pickle import Record, read_inert_pickle
from titanlite.checkpoint.manifest import DTYPES, CheckpointManifest, TensorRecord
from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.storage import StorageFolder

NAME = "chunks.json"
DCP_NAME = ".metadata"
MOST_BYTES = 1 << 30  # 1,000 ranks with 4,500 tensors: 0.2 GiB
MOST_PICKLE_BYTES = 1 << 28  # about 1.5 million chunks; only format 2 is read from it

Offsets = tuple[int, ...]


class Chunk(NamedTuple):
    """A part of a tensor, and where DCP's record of it lies."""

    sizes: tuple[int, ...]
    file: str
    start: int  # in that file
    length: int


Chunks = dict[Offsets, Chunk]  # of one tensor; those without elements are left out


def list_chunks(metadata: Metadata) -> bytes:
    """What DCP's writer has learned of the chunks, as the content of chunks.json.

    A tensor is one flat list: for each chunk its file's number, start and length, then its offsets
    and sizes.
    """
    files: dict[str, int] = {}
    chunks: dict[str, list[int]] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        chunks[name] = flat = []
        for chunk in tensor.chunks:
            if chunk.sizes.numel():
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                file = files.setdefault(info.relative_path, len(files))
                flat += (file, info.offset, info.length, *chunk.offsets, *chunk.sizes)
    return json.dumps({"files": list(files), "chunks": chunks}, separators=(",", ":")).encode()


def read_chunks(
    place: StorageFolder, manifest: CheckpointManifest, names: Iterable[str]
) -> dict[str, Chunks]:
    """The chunks of these tensors of a checkpoint, which lie within its files and fill the tensors.

    Raises CheckpointError.
    """
    old = manifest.format == 2
    file = DCP_NAME if old else NAME
    content = _read(place, manifest, file)
    try:
        rows = _rows_of_pickle(content, names) if old else _rows_of_json(content, manifest, names)
        return {name: _checked(name, manifest.tensors[name], own, manifest) for name, own in rows}
    except ValueError as error:
        why = f"{file} is not valid: {error!s:.200}"
        raise CheckpointError(f"{place}: is damaged: {why}.") from None


def dcp_metadata(manifest: CheckpointManifest, chunks: dict[str, Chunks]) -> Metadata:
    """What DCP plans its reads by."""
    tensors = {}
    for name, own in chunks.items():
        record = manifest.tensors[name]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(DTYPES[record.dtype]),
            torch.Size(record.shape),
            [ChunkStorageMetadata(torch.Size(at), torch.Size(c.sizes)) for at, c in own.items()],
        )
    return Metadata(tensors)


def _read(place: StorageFolder, manifest: CheckpointManifest, name: str) -> bytes:
    """The content of a file of a checkpoint that is what was written."""
    record = manifest.files.get(name)
    most = MOST_PICKLE_BYTES if name == DCP_NAME else MOST_BYTES
    if record is None or record.bytes > most:
        what = "is not in the manifest" if record is None else f"has {record.bytes:,} bytes"
        raise CheckpointError(f"{place}: is damaged: {name} {what} (at most {most:,} are read).")
    try:
        with place.reading(name) as stream:
            content = stream.read(record.bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{place}: is damaged: {name} cannot be read ({error}).") from None
    if xxhash.xxh3_128_hexdigest(content) != record.hash:
        raise CheckpointError(
            f"{place}: is damaged: {name} does not hold what was written (its hash differs)."
        )
    return content


# --- rows: (offsets, sizes, file, start, length) of one tensor's chunks --------------------------

Row = tuple[tuple, tuple, Any, Any, Any]


def _rows_of_json(
    content: bytes, manifest: CheckpointManifest, names: Iterable[str]
) -> Iterator[tuple[str, Iterator[Row]]]:
    # Nested lists take thirty times their bytes in memory; flat ones do not.
    if content.count(b"[") + content.count(b"{") > len(manifest.tensors) + 3:
        raise ValueError("more lists than tensors")
    table = parse_json(content)
    files, chunks = (_of(table, dict).get(key) for key in ("files", "chunks"))
    for name in names:
        flat = _of(_of(chunks, dict).get(name), list)
        yield name, _cut(flat, len(manifest.tensors[name].shape), _of(files, list))


def _cut(flat: list, dims: int, files: list) -> Iterator[Row]:
    if set(map(type, flat)) - {int} or len(flat) % (3 + 2 * dims):
        raise ValueError("a tensor's list is not whole numbers, as many as its chunks need")
    for at in range(0, len(flat), 3 + 2 * dims):
        file, start, length, *rest = flat[at : at + 3 + 2 * dims]
        if not 0 <= file < len(files):
            raise ValueError(f"file number {file} of {len(files)}")
        yield tuple(rest[:dims]), tuple(rest[dims:]), files[file], start, length


def _rows_of_pickle(content: bytes, names: Iterable[str]) -> Iterator[tuple[str, Iterator[Row]]]:
    metadata = _fields(read_inert_pickle(content), "Metadata")
    places: dict[tuple, Row] = {}
    for index, info in _of(metadata.get("storage_data"), dict).items():
        at, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        if where.get("transform_descriptors"):
            raise ValueError("chunks that are transformed")
        key = (_of(at.get("fqn"), str), _size(at.get("offset")))
        places[key] = tuple(where.get(key) for key in ("relative_path", "offset", "length"))
    tensors, left = _of(metadata.get("state_dict_metadata"), dict), len(content)
    for name in names:
        chunks = _of(_fields(tensors.get(name), "TensorStorageMetadata").get("chunks"), list)
        left -= len(chunks)
        if left < 0:  # each has bytes of its own, unless lists are shared
            raise ValueError("more chunks than it has room for")
        yield name, _located(name, chunks, places)


def _located(name: str, chunks: list, places: dict[tuple, Row]) -> Iterator[Row]:
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        yield offsets, sizes, *places.get((name, offsets), (None, None, None))


def _fields(value: Any, kind: str) -> dict:
    """What a record of DCP's class `kind` holds."""
    if type(value) is not Record or value.kind.rpartition(".")[2] != kind:
        found = value.kind if type(value) is Record else type(value).__name__
        raise ValueError(f"a {found:.80} instead of a {kind}")
    return _of(value.state, dict)


def _size(value: Any) -> tuple:
    """The numbers of a torch.Size."""
    if type(value) is not Record or value.kind != "torch.Size" or len(value.arguments) != 1:
        raise ValueError("what is not a torch.Size")
    numbers = _of(value.arguments[0], tuple)
    if len(numbers) > 64 or set(map(type, numbers)) - {int}:
        raise ValueError("a torch.Size that is not whole numbers")
    return numbers


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _checked(
    name: str, tensor: TensorRecord, rows: Iterator[Row], manifest: CheckpointManifest
) -> Chunks:
    """The chunks of a tensor, inside it and inside their files; ValueError where they are not."""
    chunks: Chunks = {}
    filled = 0
    for offsets, sizes, file, start, length in rows:
        if not math.prod(sizes):
            continue
        inside = len(offsets) == len(sizes) == len(tensor.shape) and all(
            at >= 0 and size > 0 and at + size <= whole
            for at, size, whole in zip(offsets, sizes, tensor.shape, strict=True)
        )
        if not inside or offsets in chunks:
            where = "twice" if inside else f"in a tensor of {tensor.shape}"
            raise ValueError(f"{name} has a chunk of {list(sizes)} at {list(offsets)} {where}")
        record = manifest.files.get(file) if type(file) is str else None
        numbers = type(start) is type(length) is int
        if record is None or not numbers or start < 0 or not 0 < length <= record.bytes - start:
            raise ValueError(f"{name} has a chunk that is not inside a file of the checkpoint")
        chunks[offsets] = Chunk(sizes, file, start, length)
        filled += math.prod(sizes)
    if filled != math.prod(tensor.shape):
        raise ValueError(f"{name} has {math.prod(tensor.shape)} elements, its chunks {filled}")
    return chunks
