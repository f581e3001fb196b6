"""Checkpoints in the memory of hosts (GEMINI, SOSP 2023): their files, and how a start reads them.

A *set* is the state of one step. The shards of each rank are one file in the memory of its host,
and one in that of another host. A header at its end, written last, has the hash of the shards,
their places, and what a manifest has. A set is complete if a file of each distinct list of shards
is there, on any host: replicas have equal lists.

A *history* is what one process group trains after a start or a roll-back. `memory.json` in the
checkpoint folder has its random name. Only its sets count, and the one that it was loaded from, so
that no set of a rolled-back, replaced or other run is ever loaded.
"""

from __future__ import annotations

import json
import math
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite.checkpoint.chunks import Chunk, Chunks, to_dcp_metadata
from titanlite.checkpoint.dcp import BaseStorageReader, completed_future
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    CheckpointManifest,
    TensorRecord,
    manifest_hash,
)
from titanlite.checkpoint.model_state import State
from titanlite.distributed.collectives import gather_from_all_ranks, local_shard, shard_region
from titanlite.files import make_private_folder, parse_json
from titanlite.storage import HashingStream

FOLDER_VARIABLE = "TITANLITE_MEMORY_FOLDER"  # of the environment; each host may have its own
MESSAGE_BYTES = 1 << 26  # most bytes of one message between ranks, unless one row has more
ALIGNMENT = 64  # bytes, of each shard in a file
MAX_HEADER_BYTES = 1 << 26
open_private = partial(os.open, mode=0o600)  # an `opener` of files that only this user can read

# name of a tensor -> [dtype, its shape, offsets and sizes of the shard, its first byte in the file]
Shards = dict[str, list[Any]]


class MemoryFile(NamedTuple):
    """A file with the shards of one rank: its header, and where it is."""

    history: str
    step: int
    layout: str  # hash of `shards`
    layouts: int  # number of different ones in the set
    common: dict[str, Any]  # what a manifest has, the same in each file of a set
    shards: Shards
    bytes: int  # of the shards; the header follows them
    hash: str  # of the shards
    path: str
    server: int = 0  # the rank of its host that hashes and sends it
    here: bool = False  # whether its host is that of this rank


class ShardPart(NamedTuple):
    """A part of a shard that a rank reads."""

    file: int  # index in the set
    begin: int  # first byte of the shard in the file
    dtype: str
    sizes: list[int]  # of the shard
    offsets: list[int]  # of the part in it
    lengths: list[int]  # of the part


def open_host_folder(run: str) -> tuple[Path, str]:
    """(folder of a run's files on this host, a text that only ranks with the same memory have).

    Raises OSError, also if other users can write to the folder.
    """
    memory = Path(os.environ.get(FOLDER_VARIABLE) or "/dev/shm").resolve(strict=True)
    folder = make_private_folder(memory) / f"memory-{xxhash.xxh3_64_hexdigest(run.encode())}"
    folder.mkdir(mode=0o700, exist_ok=True)
    boot = Path("/proc/sys/kernel/random/boot_id")  # of Linux; hosts may have equal names
    identity = boot.read_text().strip() if boot.exists() else ""
    return folder, f"{socket.gethostname()} {identity} {folder.stat().st_dev} {folder.resolve()}"


def list_shards(state: State) -> tuple[Shards, list[Tensor], int]:
    """(places of this rank's shards in its file, the shards, bytes of the file)."""
    shards: Shards = {}
    tensors: list[Tensor] = []
    begin = 0
    for name, value in ((f"{p}.{n}", v) for p, part in state.items() for n, v in part.items()):
        local, offsets = local_shard(value.detach()), (0,) * value.dim()
        if isinstance(value, DTensor) and (at := value.device_mesh.get_coordinate()) is not None:
            offsets = shard_region(value, at)[1]
        if local.numel():
            dtype = str(local.dtype).removeprefix("torch.")
            shards[name] = [dtype, list(value.shape), list(offsets), list(local.shape), begin]
            tensors.append(local)
            begin += -(-local.nbytes // ALIGNMENT) * ALIGNMENT
    return shards, tensors, begin


def write_file(path: Path, tensors: Iterable[Tensor], header: dict[str, Any]) -> None:
    """Write the shards, which are in host memory, then the header and its length."""
    part = path.with_suffix(".part")
    with open(part, "wb", opener=open_private) as file:
        stream = HashingStream(file)
        for tensor in tensors:
            stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            stream.write(bytes(-tensor.nbytes % ALIGNMENT))
        header = {**header, "bytes": stream.bytes, "hash": stream.hash}
        content = json.dumps({**header, "header_hash": manifest_hash(header)}).encode()
        file.write(content + len(content).to_bytes(8, "little"))
    part.rename(path)


def allocate_file(path: Path, size: int) -> Tensor:
    """A new file of `size` bytes, mapped; raises OSError if the memory is full."""
    with open(path, "wb", opener=open_private) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # else a write to the mapping could be a SIGBUS
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def read_header(path: Path) -> dict[str, Any]:
    """Read the header of a file; raises OSError or ValueError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise ValueError("a link, or a file of another user")
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        length = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        file.seek(-8 - length, os.SEEK_END)
        header = parse_json(file.read(length))
    if header.pop("header_hash", None) != manifest_hash(header):
        raise ValueError("changed after it was written")
    return header


def list_files(folder: Path, history: list[Any]) -> list[MemoryFile]:
    """The files on this host that `history` allows; not those whose header is not valid."""
    files = []
    for path in sorted(folder.glob("*.bin")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            header = read_header(path)
            key = [header["history"], header["step"]]
            if key[0] == history[0] or key == history[1]:
                files.append(MemoryFile(**header, path=str(path)))
    return files


@dataclass
class MemorySet:
    """The files of one step on all hosts: the same list on all ranks, but for `here`."""

    files: list[MemoryFile]
    group: dist.ProcessGroup
    opened: dict[str, Tensor] = field(default_factory=dict)  # bytes of files, by path

    @property
    def key(self) -> tuple[str, int]:
        """Its history and step."""
        return self.files[0].history, self.files[0].step

    def verify(self) -> tuple[CheckpointManifest | None, list[str]]:
        """(its manifest, which files were dropped because they are wrong), hashing all. Collective.

        None if it is not complete: of each part, one good copy is enough.
        """
        first, good = self.files[0], []
        text = f"memory checkpoint of step {first.step}"
        for index, file in enumerate(self.files):
            if file.server == dist.get_rank():
                with suppress(OSError, RuntimeError):
                    content = self.open(file).numpy().data
                    good += [index] if xxhash.xxh3_128_hexdigest(content) == file.hash else []
        self.opened.clear()
        indices = {index for listed in gather_from_all_ranks(good, self.group) for index in listed}
        problems = [
            f"{text}: {file.path}, on the host of rank {file.server}, is not what was written"
            for index, file in enumerate(self.files)
            if index not in indices
        ]
        valid = [self.files[index] for index in sorted(indices)]
        lost = first.layouts - len({file.layout for file in valid})
        if lost:
            return None, [*problems, f"{text}: {lost} of {first.layouts} parts are lost"]
        self.files = valid
        tensors = {
            name: TensorRecord(shape, dtype, "")
            for file in valid
            for name, (dtype, shape, *_) in file.shards.items()
        }
        about = first.common["manifest"]
        return CheckpointManifest(first.step, **about, files={}, tensors=tensors), problems

    def open(self, file: MemoryFile) -> Tensor:
        """The shards of a file on this host, mapped; raises OSError or RuntimeError."""
        if file.path not in self.opened:
            size = min(file.bytes, os.path.getsize(file.path))  # else it would grow
            self.opened[file.path] = torch.from_file(file.path, size=size, dtype=torch.uint8)
        return self.opened[file.path]

    def read(self, part: ShardPart) -> Tensor:
        """A part of a file on this host."""
        dtype = DTYPE_OF_NAME[part.dtype]
        end = part.begin + dtype.itemsize * math.prod(part.sizes)
        shard = self.open(self.files[part.file])[part.begin : end].view(dtype)
        box = [slice(o, o + n) for o, n in zip(part.offsets, part.lengths, strict=True)]
        return shard.view(part.sizes)[tuple(box)]


class MemoryReader(BaseStorageReader):
    """Notes what DCP plans to read of a set; `transfer` reads it, once all ranks have planned."""

    def __init__(self, memory_set: MemorySet, manifest: CheckpointManifest):
        self.set, self.manifest = memory_set, manifest
        self.chunks: dict[str, Chunks] = {}
        self.reads: list[tuple[ShardPart, Tensor]] = []  # what, and into which tensor

    def read_metadata(self) -> Metadata:
        files, rank = self.set.files, dist.get_rank()
        # of equal shards, one on this rank's host; else the ranks choose different hosts
        order = [(not file.here, (i - rank) % len(files), i) for i, file in enumerate(files)]
        for *_, index in sorted(order):
            for name, (dtype, _, offsets, sizes, begin) in files[index].shards.items():
                length = DTYPE_OF_NAME[dtype].itemsize * math.prod(sizes)
                chunk = Chunk(tuple(sizes), str(index), begin, length)
                self.chunks.setdefault(name, {}).setdefault(tuple(offsets), chunk)
        return to_dcp_metadata(self.manifest, self.chunks)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name, offsets = item.storage_index.fqn, list(item.storage_offsets) or [0]
            chunk = self.chunks[name][tuple(item.storage_index.offset or ())]
            dtype, sizes = self.manifest.tensors[name].dtype, list(chunk.sizes) or [1]
            target = planner.resolve_tensor(item).detach()
            target = target if target.dim() else target.reshape(1)
            rows = MESSAGE_BYTES // (DTYPE_OF_NAME[dtype].itemsize * math.prod(target.shape[1:]))
            for out in target.split(max(1, rows)):
                shape = list(out.shape)
                part = ShardPart(int(chunk.file), chunk.start, dtype, sizes, offsets, shape)
                self.reads.append((part, out))
                offsets = [offsets[0] + len(out), *offsets[1:]]
        return completed_future(None)

    def transfer(self) -> None:
        """Read the parts, those on other hosts over the process group. Collective.

        All ranks take the transfers in the same order, so no two wait for each other.
        """
        rank, group, files = dist.get_rank(), self.set.group, self.set.files
        for part, target in self.reads:
            if files[part.file].here:
                target.copy_(self.set.read(part))
        remote = [read for read in self.reads if not files[read[0].file].here]
        wanted = gather_from_all_ranks([part for part, _ in remote] or None, group)
        turns = [(turn, to) for to, parts in enumerate(wanted) for turn in range(len(parts or ()))]
        for turn, to in sorted(turns):
            part = ShardPart(*wanted[to][turn])
            server = files[part.file].server
            if server == rank:
                sent = self.set.read(part).contiguous()
                dist.send(sent.view(-1).view(torch.uint8), group=group, group_dst=to)
            elif to == rank:
                received = torch.empty(part.lengths, dtype=DTYPE_OF_NAME[part.dtype])
                dist.recv(received.view(-1).view(torch.uint8), group=group, group_src=server)
                remote[turn][1].copy_(received)
        self.set.opened.clear()  # a removed file takes memory as long as it is mapped
