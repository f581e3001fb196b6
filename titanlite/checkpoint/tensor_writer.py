"""Write tensors to a folder through torch.distributed.checkpoint (DCP), from any layout.

The files are DCP's own, so every tool that reads DCP checkpoints reads them. In addition, each file
is hashed while it is written, and is on the disk when it is closed.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.chunks import CHUNKS_FILE, dump_chunks, tensors_of
from titanlite.checkpoint.collective_save import CollectiveSave
from titanlite.checkpoint.dcp import (
    as_checkpoint_error,
    completed_future,
    ignore_no_dist_warning,
)
from titanlite.checkpoint.manifest import MANIFEST_FILE, FileRecord, TensorRecord
from titanlite.checkpoint.model_state import State
from titanlite.storage import UNFINISHED, StorageFolder, StorageUnreachable

# Called with the files and tensors that were written; makes the folder a checkpoint.
Commit = Callable[[dict[str, FileRecord], dict[str, TensorRecord]], None]


def write_tensors(
    folder: StorageFolder,
    state: State,
    saves: CollectiveSave,
    commit: Commit,
    check_lease: Callable[[], object] = lambda: None,
) -> None:
    """Write the shards of all ranks of a group, then call `commit` on its first rank. Collective.

    `saves` has the group, and its plans from the last save. `check_lease` is called on the first
    rank before the folder is touched; it raises if another job owns the folder. Raises
    CheckpointError on every rank if writing fails on any; `folder` is then not a checkpoint.
    """

    def prepare(metadata: Metadata) -> None:
        check_lease()
        tensors = tensors_of(metadata).values()
        _prepare_folder(folder, sum(map(_tensor_bytes, tensors)))

    saves.run(folder, state, _HashingPlanner(), _HashingWriter(folder, commit), prepare)


def write_tensors_one_by_one(
    folder: StorageFolder,
    tensors: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    commit: Commit,
) -> None:
    """Write tensors from one process, each loaded just before it is written.

    Only shape and dtype of `tensors` are used; `load` returns the tensor of a name.
    """
    with as_checkpoint_error(folder, "written"), ignore_no_dist_warning():
        _prepare_folder(folder, sum(map(_tensor_bytes, tensors.values())))
        dcp.save(
            dict(tensors),
            storage_writer=_HashingWriter(folder, commit),
            planner=_LoadingPlanner(load),
            no_dist=True,
        )


def write_small_files(
    folder: StorageFolder, contents: Mapping[str, bytes]
) -> dict[str, FileRecord]:
    """Write files such as the tokenizer, before the manifest that lists them."""
    records = {}
    for name, content in contents.items():
        with folder.open_for_writing(name) as stream:
            stream.write(content)
        records[name] = FileRecord(stream.bytes, stream.hash)
    return records


@dataclass(frozen=True)
class _RankHashes(WriteResult):
    """Hashes of one rank's files and tensors; gathered with DCP's own results."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, int]


class _HashingPlanner(DefaultSavePlanner):
    """Hashes each chunk of a tensor when DCP asks for its data."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: dict[str, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor), f"{write_item.index.fqn}: only tensors are saved"
        data = data.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().data
        name = write_item.index.fqn
        self.hashes[name] = self.hashes.get(name, 0) + xxhash.xxh3_64_intdigest(raw)
        return data


class _LoadingPlanner(_HashingPlanner):
    """Loads each tensor when DCP asks for its data."""

    def __init__(self, load: Callable[[str], Tensor]):
        super().__init__()
        self.load = load

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.load(index.fqn)


class _HashingWriter(dcp.FileSystemWriter):
    """DCP's writer into a fresh `StorageFolder`, with a commit at the end."""

    def __init__(self, folder: StorageFolder, commit: Commit):
        super().__init__(
            folder.path,
            sync_files=False,  # `folder` does this where the files are local
            # No copies to overlap: the planner returns tensors on the CPU. By default DCP would
            # still wait, every 10 MB, for all that is enqueued on the device.
            per_thread_copy_ahead=0,
        )
        self.folder, self.commit = folder, commit
        self.fs = self.files = _HashingFileSystem(folder)
        self.path = folder.path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP's own method would create the folder, on every rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert isinstance(planner, _HashingPlanner)
        results = super().write_data(plan, planner).wait()
        hashes = _RankHashes(MetadataIndex(""), 0, None, self.files.written, planner.hashes)
        return completed_future([*results, hashes])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the lists of chunks and commit; runs on the first rank."""
        flat = [result for rank_results in results for result in rank_results]
        hashes = [result for result in flat if isinstance(result, _RankHashes)]
        written = [result for result in flat if not isinstance(result, _RankHashes)]
        # DCP's `finish` does this too, but to a copy of the metadata in torch 2.11.
        metadata.storage_data = {result.index: result.storage_data for result in written}
        super().finish(metadata, [written])
        with self.files.create_stream(self.folder.path_of(CHUNKS_FILE), "wb") as stream:
            stream.write(dump_chunks(metadata))
        files = {name: record for rank in hashes for name, record in rank.files.items()}
        tensors = {
            name: TensorRecord(
                list(tensor.size),
                str(tensor.properties.dtype).removeprefix("torch."),
                f"{sum(rank.tensors.get(name, 0) for rank in hashes) % 2**64:016x}",
            )
            for name, tensor in tensors_of(metadata).items()
        }
        self.commit(files | self.files.written, tensors)
        with suppress(OSError, StorageUnreachable):  # beside a manifest, the marker has no effect
            self.folder.delete(UNFINISHED)


def _prepare_folder(folder: StorageFolder, needed_bytes: int) -> None:
    """Replace the folder by an empty one that is marked as unfinished.

    Writing over an older save could mix the files of both after a crash. Raises CheckpointError,
    and leaves the empty folder, if `needed_bytes` do not fit on its disk.
    """
    if folder.exists():
        folder.remove(delete_first=MANIFEST_FILE)
    folder.create_folder()
    folder.check_free_space(
        needed_bytes, fix="Free disk space, or keep fewer checkpoints (checkpoint.keep_latest_k)."
    )
    with folder.open_for_writing(UNFINISHED):  # no rename needed: it is empty, so never torn
        pass
    folder.fsync_folder()


def _tensor_bytes(tensor: Tensor | TensorStorageMetadata) -> int:
    dtype = tensor.dtype if isinstance(tensor, Tensor) else tensor.properties.dtype
    return math.prod(tensor.shape if isinstance(tensor, Tensor) else tensor.size) * dtype.itemsize


class _HashingFileSystem(FileSystem):
    """DCP's file system interface to a `StorageFolder`; records hashes of the written files."""

    def __init__(self, folder: StorageFolder):
        self.folder = folder
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb", "DCP only writes through this file system"
        name = _last_name(path)
        with self.folder.open_for_writing(name) as stream:
            yield stream
        self.written[name] = FileRecord(stream.bytes, stream.hash)

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        name, new_name = _last_name(path), _last_name(new_path)
        self.folder.rename_file(name, new_name)
        self.written[new_name] = self.written.pop(name)

    def mkdir(self, path: Any) -> None:
        self.folder.create_folder()

    def exists(self, path: Any) -> bool:
        return self.folder.fs.exists(str(path))

    def rm_file(self, path: Any) -> None:
        self.folder.fs.rm_file(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _last_name(path: Any) -> str:
    return str(path).rpartition("/")[2]
