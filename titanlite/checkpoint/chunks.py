"""The locations of each tensor's chunks in the files of a checkpoint, as JSON.

A chunk is the part of a tensor that one rank has written. DCP records the locations in `.metadata`,
a pickle, which is written for DCP's own tools and never read here. `chunks.json` is separate from
the manifest, which is read at every save: thousands of ranks have millions of chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
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

from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    CheckpointManifest,
    damaged_checkpoint,
    wrong_hash,
)
from titanlite.files import parse_json
from titanlite.storage import StorageFolder

CHUNKS_FILE = "chunks.json"
MAX_CHUNKS_BYTES = 1 << 30  # 1,000 ranks with 4,500 tensors: 0.2 GiB

Offsets = tuple[int, ...]


class Chunk(NamedTuple):
    """A chunk's sizes, and the byte range of a file in which DCP stored it."""

    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


Chunks = dict[Offsets, Chunk]  # of one tensor; empty chunks are left out


def dump_chunks(metadata: Metadata) -> bytes:
    """The content of chunks.json, from the metadata that DCP's writer has collected.

    A tensor is one flat list: for each chunk its file's number, start, length, offsets and sizes.
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
    content = _read_chunk_list(folder, manifest)
    try:
        # Nested lists take thirty times their bytes in memory; flat ones do not.
        if content.count(b"[") + content.count(b"{") > len(manifest.tensors) + 3:
            raise ValueError("more lists than tensors")
        table = _expect_type(parse_json(content), dict)
        files = _expect_type(table.get("files"), list)
        lists = _expect_type(table.get("chunks"), dict)
        return {
            name: _parse_chunks(name, _expect_type(lists.get(name), list), files, manifest)
            for name in names
        }
    except ValueError as error:
        reason = f"{CHUNKS_FILE} is not valid: {error!s:.200}"
        raise damaged_checkpoint(folder, reason) from None


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


def _read_chunk_list(folder: StorageFolder, manifest: CheckpointManifest) -> bytes:
    """Read chunks.json, and compare the content with its hash in the manifest."""
    record = manifest.files.get(CHUNKS_FILE)
    if record is None:
        raise damaged_checkpoint(folder, f"{CHUNKS_FILE} is not in the manifest")
    if record.bytes > MAX_CHUNKS_BYTES:
        raise damaged_checkpoint(
            folder, f"{CHUNKS_FILE} has {record.bytes:,} bytes (the limit is {MAX_CHUNKS_BYTES:,})"
        )
    try:
        with folder.open_for_reading(CHUNKS_FILE) as stream:
            content = stream.read(record.bytes + 1)
    except OSError as error:
        raise damaged_checkpoint(folder, f"{CHUNKS_FILE} cannot be read ({error})") from None
    if xxhash.xxh3_128_hexdigest(content) != record.hash:
        raise wrong_hash(folder, CHUNKS_FILE)
    return content


def _expect_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _parse_chunks(name: str, flat: list, files: list, manifest: CheckpointManifest) -> Chunks:
    """The chunks of a tensor; raises ValueError unless they pass the checks of `read_chunks`."""
    shape = manifest.tensors[name].shape
    dims, row_length = len(shape), 3 + 2 * len(shape)
    if set(map(type, flat)) - {int} or len(flat) % row_length:
        raise ValueError(f"the list of a tensor is not rows of {row_length} integers")
    chunks: Chunks = {}
    for index in range(0, len(flat), row_length):
        number, start, length, *rest = flat[index : index + row_length]
        offsets, sizes = tuple(rest[:dims]), tuple(rest[dims:])
        inside = all(
            offset >= 0 and size > 0 and offset + size <= whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        if not inside or offsets in chunks:
            problem = "twice" if inside else f"in a tensor of {shape}"
            raise ValueError(f"{name} has a chunk of {list(sizes)} at {list(offsets)} {problem}")
        if not 0 <= number < len(files):
            raise ValueError(f"file number {number} of {len(files)}")
        file = files[number]
        record = manifest.files.get(file) if type(file) is str else None
        if record is None or start < 0 or not 0 < length <= record.bytes - start:
            raise ValueError(f"{name} has a chunk that is not inside a file of the checkpoint")
        chunks[offsets] = Chunk(sizes, file, start, length)
    filled = sum(math.prod(chunk.sizes) for chunk in chunks.values())
    if filled != math.prod(shape):
        raise ValueError(f"{name} has {math.prod(shape)} elements, but its chunks {filled}")
    return chunks
