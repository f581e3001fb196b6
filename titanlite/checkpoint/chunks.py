"""The locations of each tensor's chunks in the files of a checkpoint, as JSON.

A chunk is the part of a tensor that one rank has written. DCP records the locations in `.metadata`,
a pickle, which is written for DCP's own tools and never unpickled here: for format 2, which has no
`chunks.json`, it is read as plain data. `chunks.json` is separate from the manifest, because the
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
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.inert_pickle import InertObject, read_inert_pickle
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    CheckpointManifest,
    TensorRecord,
    damaged_checkpoint,
    wrong_hash,
)
from titanlite.files import parse_json
from titanlite.storage import StorageFolder

CHUNKS_FILE = "chunks.json"
DCP_METADATA_FILE = ".metadata"
MAX_CHUNKS_BYTES = 1 << 30  # 1,000 ranks with 4,500 tensors: 0.2 GiB
MAX_DCP_METADATA_BYTES = 1 << 28  # about 1.5 million chunks; read for format 2 only

Offsets = tuple[int, ...]


class Chunk(NamedTuple):
    """A chunk's sizes, and the byte range of a file in which DCP stored it."""

    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


Chunks = dict[Offsets, Chunk]  # of one tensor; empty chunks are left out

# (offsets, sizes, file, start, length) of one chunk, as stored and not checked yet
ChunkRow = tuple[Any, Any, Any, Any, Any]


def dump_chunks(metadata: Metadata) -> bytes:
    """The content of chunks.json, from the metadata that DCP's writer has collected.

    A tensor is one flat list: for each chunk the number of its file, start and length, then its
    offsets and sizes.
    """
    files: dict[str, int] = {}
    chunks: dict[str, list[int]] = {}
    for name, tensor in tensors_of(metadata).items():
        flat: list[int] = []
        for chunk in tensor.chunks:
            if chunk.sizes.numel():
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                file = files.setdefault(info.relative_path, len(files))
                flat += (file, info.offset, info.length, *chunk.offsets, *chunk.sizes)
        chunks[name] = flat
    return json.dumps({"files": list(files), "chunks": chunks}, separators=(",", ":")).encode()


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The entries of DCP's metadata, which are all tensors because nothing else is saved."""
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name}: only tensors are saved"
        tensors[name] = entry
    return tensors


def read_chunks(
    folder: StorageFolder, manifest: CheckpointManifest, names: Iterable[str]
) -> dict[str, Chunks]:
    """Read the chunks of these tensors; raises CheckpointError.

    The chunks are checked: they lie inside their files and their tensor, no two have equal offsets,
    and together they have as many elements as the tensor. Whether they overlap is not checked.
    """
    is_pickle = manifest.format == 2
    file = DCP_METADATA_FILE if is_pickle else CHUNKS_FILE
    content = _read_chunk_list(folder, manifest, file)
    try:
        if is_pickle:
            rows = _rows_of_pickle(content, names)
        else:
            rows = _rows_of_json(content, manifest, names)
        return {
            name: _check_chunks(name, manifest.tensors[name], tensor_rows, manifest)
            for name, tensor_rows in rows
        }
    except ValueError as error:
        raise damaged_checkpoint(folder, f"{file} is not valid: {error!s:.200}") from None


def to_dcp_metadata(manifest: CheckpointManifest, chunks: dict[str, Chunks]) -> Metadata:
    """The metadata from which DCP plans its reads."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor_chunks in chunks.items():
        record = manifest.tensors[name]
        tensors[name] = TensorStorageMetadata(
            TensorProperties(DTYPE_OF_NAME[record.dtype]),
            torch.Size(record.shape),
            [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(chunk.sizes))
                for offsets, chunk in tensor_chunks.items()
            ],
        )
    return Metadata(tensors)


def _read_chunk_list(folder: StorageFolder, manifest: CheckpointManifest, name: str) -> bytes:
    """Read chunks.json or .metadata, and compare the content with its hash in the manifest."""
    record = manifest.files.get(name)
    limit = MAX_DCP_METADATA_BYTES if name == DCP_METADATA_FILE else MAX_CHUNKS_BYTES
    if record is None:
        raise damaged_checkpoint(folder, f"{name} is not in the manifest")
    if record.bytes > limit:
        raise damaged_checkpoint(
            folder, f"{name} has {record.bytes:,} bytes (the limit is {limit:,})"
        )
    try:
        with folder.open_for_reading(name) as stream:
            content = stream.read(record.bytes + 1)
    except OSError as error:
        raise damaged_checkpoint(folder, f"{name} cannot be read ({error})") from None
    if xxhash.xxh3_128_hexdigest(content) != record.hash:
        raise wrong_hash(folder, name)
    return content


def _rows_of_json(
    content: bytes, manifest: CheckpointManifest, names: Iterable[str]
) -> Iterator[tuple[str, Iterator[ChunkRow]]]:
    # Nested lists take thirty times their bytes in memory; flat ones do not.
    if content.count(b"[") + content.count(b"{") > len(manifest.tensors) + 3:
        raise ValueError("more lists than tensors")
    table = parse_json(content)
    files, chunks = (_expect_type(table, dict).get(key) for key in ("files", "chunks"))
    for name in names:
        flat = _expect_type(_expect_type(chunks, dict).get(name), list)
        dims = len(manifest.tensors[name].shape)
        yield name, _split_flat_list(flat, dims, _expect_type(files, list))


def _split_flat_list(flat: list, dims: int, files: list) -> Iterator[ChunkRow]:
    """Split the flat list of a tensor of `dims` dimensions into one row a chunk."""
    row_length = 3 + 2 * dims
    if set(map(type, flat)) - {int} or len(flat) % row_length:
        raise ValueError(f"the list of a tensor is not rows of {row_length} integers")
    for index in range(0, len(flat), row_length):
        file, start, length, *rest = flat[index : index + row_length]
        if not 0 <= file < len(files):
            raise ValueError(f"file number {file} of {len(files)}")
        yield tuple(rest[:dims]), tuple(rest[dims:]), files[file], start, length


def _rows_of_pickle(
    content: bytes, names: Iterable[str]
) -> Iterator[tuple[str, Iterator[ChunkRow]]]:
    metadata = _fields_of(read_inert_pickle(content), "Metadata")
    locations: dict[tuple, tuple[Any, Any, Any]] = {}
    for index_object, info_object in _expect_type(metadata.get("storage_data"), dict).items():
        index = _fields_of(index_object, "MetadataIndex")
        info = _fields_of(info_object, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("transformed chunks are not supported")
        key = (_expect_type(index.get("fqn"), str), _numbers_of_size(index.get("offset")))
        locations[key] = (info.get("relative_path"), info.get("offset"), info.get("length"))
    tensors = _expect_type(metadata.get("state_dict_metadata"), dict)
    chunks_left = len(content)
    for name in names:
        tensor = _fields_of(tensors.get(name), "TensorStorageMetadata")
        chunks = _expect_type(tensor.get("chunks"), list)
        # A malicious pickle may use one list for many tensors, and so have more chunks than bytes.
        chunks_left -= len(chunks)
        if chunks_left < 0:
            raise ValueError("more chunks than bytes")
        yield name, _rows_of_tensor(name, chunks, locations)


def _rows_of_tensor(
    name: str, chunks: list, locations: dict[tuple, tuple[Any, Any, Any]]
) -> Iterator[ChunkRow]:
    for chunk in chunks:
        fields = _fields_of(chunk, "ChunkStorageMetadata")
        offsets, sizes = (_numbers_of_size(fields.get(key)) for key in ("offsets", "sizes"))
        yield offsets, sizes, *locations.get((name, offsets), (None, None, None))


def _fields_of(value: Any, class_name: str) -> dict:
    """The attributes of an object of DCP's class `class_name`."""
    if type(value) is not InertObject or value.class_name.rpartition(".")[2] != class_name:
        actual = value.class_name if type(value) is InertObject else type(value).__name__
        raise ValueError(f"a {actual:.80} instead of a {class_name}")
    return _expect_type(value.state, dict)


def _numbers_of_size(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    is_size = type(value) is InertObject and value.class_name == "torch.Size"
    if not is_size or len(value.arguments) != 1:
        raise ValueError("a value is not a torch.Size")
    numbers = _expect_type(value.arguments[0], tuple)
    if len(numbers) > 64 or set(map(type, numbers)) - {int}:
        raise ValueError("a torch.Size must be at most 64 integers")
    return numbers


def _expect_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _check_chunks(
    name: str, tensor: TensorRecord, rows: Iterator[ChunkRow], manifest: CheckpointManifest
) -> Chunks:
    """The chunks of a tensor; raises ValueError unless they pass the checks of `read_chunks`."""
    chunks: Chunks = {}
    filled = 0
    for offsets, sizes, file, start, length in rows:
        if not math.prod(sizes):
            continue
        inside = len(offsets) == len(sizes) == len(tensor.shape) and all(
            offset >= 0 and size > 0 and offset + size <= whole
            for offset, size, whole in zip(offsets, sizes, tensor.shape, strict=True)
        )
        if not inside or offsets in chunks:
            problem = "twice" if inside else f"in a tensor of {tensor.shape}"
            raise ValueError(f"{name} has a chunk of {list(sizes)} at {list(offsets)} {problem}")
        record = manifest.files.get(file) if type(file) is str else None
        numbers = type(start) is type(length) is int
        if record is None or not numbers or start < 0 or not 0 < length <= record.bytes - start:
            raise ValueError(f"{name} has a chunk that is not inside a file of the checkpoint")
        chunks[offsets] = Chunk(sizes, file, start, length)
        filled += math.prod(sizes)
    if filled != math.prod(tensor.shape):
        raise ValueError(f"{name} has {math.prod(tensor.shape)} elements, but its chunks {filled}")
    return chunks
