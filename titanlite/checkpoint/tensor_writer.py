"""Write tensors to a folder through torch.distributed.checkpoint (DCP), from any layout.

The files are DCP's own, so every tool that reads DCP checkpoints reads them. In addition, each file
is hashed while it is written, and is on the disk when it is closed.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from titanlite.checkpoint.chunks import CHUNKS_FILE, dump_chunks, tensors_of
from titanlite.checkpoint.dcp import as_checkpoint_error, call_on_all_ranks, completed_future
from titanlite.checkpoint.manifest import MANIFEST_FILE, FileRecord, TensorRecord
from titanlite.checkpoint.model_state import State
from titanlite.distributed.collectives import run_on_rank_0
from titanlite.distributed.rank_tree import RankTree
from titanlite.storage import UNFINISHED, StorageFolder, StorageUnreachable

# Called with the files and tensors that were written; makes the folder a checkpoint.
Commit = Callable[[dict[str, FileRecord], dict[str, TensorRecord]], None]


def write_tensors(
    folder: StorageFolder,
    state: State,
    saves: CollectiveSave,
    commit: Commit,
    check_lease: Callable[[], object] = lambda: None,
    load: Callable[[str], Tensor] | None = None,
) -> None:
    """Write the shards of all ranks of a group, then call `commit` on its first rank. Collective.

    `saves` has the group, and its plans from the last save. `check_lease` is called on the first
    rank before the folder is touched; it raises if another job owns the folder. With `load`, only
    shape and dtype of the tensors are used: it returns the tensor of a name such as
    "model.norm.weight", just before it is written. Raises CheckpointError on every rank if writing
    fails on any; `folder` is then not a checkpoint.
    """

    def prepare(metadata: Metadata) -> None:
        check_lease()
        tensors = tensors_of(metadata).values()
        needed = sum(math.prod(t.size) * t.properties.dtype.itemsize for t in tensors)
        _prepare_folder(folder, needed)

    saves.run(folder, state, _HashingPlanner(load), _HashingWriter(folder, commit), prepare)


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
    """Hashes each chunk of a tensor when DCP asks for its data, and loads it first by `load`."""

    def __init__(self, load: Callable[[str], Tensor] | None):
        super().__init__()
        self.hashes: dict[str, int] = {}
        self._load = load

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._load is None else self._load(index.fqn)

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor), f"{write_item.index.fqn}: only tensors are saved"
        data = data.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().data
        name = write_item.index.fqn
        self.hashes[name] = self.hashes.get(name, 0) + xxhash.xxh3_64_intdigest(raw)
        return data


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


class CollectiveSave:
    """Saves of the ranks of one group; keeps the plans for the next save.

    `dcp.save` gathers the plans of all ranks on rank 0 at every save, connects rank 0 to every rank
    for this, and then sends the metadata of all chunks to every rank. Here the plans are sent along
    a tree of ranks, and only if one of them has changed, and the metadata stays on rank 0. (DCP's
    own `enable_plan_caching` still sends the metadata, and after a save that failed, the next one
    fails with a KeyError; torch 2.11 to 2.15.) Plans are exchanged as pickles, as by `dcp.save`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.exchanges = 0  # how often the plans of all ranks were exchanged
        self._local: SavePlan | None = None  # lists all chunks of this rank
        self._final: SavePlan | None = None  # lists only those that this rank writes
        self._metadata: Metadata | None = None  # of all plans, on rank 0

    def run(
        self,
        folder: StorageFolder,
        state: State,
        planner: SavePlanner,
        writer: StorageWriter,
        prepare: Callable[[Metadata], None],
    ) -> None:
        """Write the state into `folder`. Collective.

        `prepare` is called on rank 0 before any rank writes, with the metadata of all ranks'
        tensors. Raises CheckpointError on every rank if anything fails on any.
        """
        tree = RankTree(self.group)

        def plan_locally() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), tree.is_root)
            writer.set_up_storage_writer(tree.is_root, rank=tree.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        local = call_on_all_ranks(plan_locally, folder, "written", self.group)
        (changed,) = tree.max([local != self._local])
        if changed:
            self._exchange_plans(tree, folder, local, planner, writer)
        final, metadata = self._final, self._metadata
        assert final is not None
        self._on_rank_0(folder, lambda: prepare(_copy(metadata)))
        results = call_on_all_ranks(
            lambda: writer.write_data(planner.finish_plan(final), planner).wait(),
            folder,
            "written",
            self.group,
        )
        gathered = _gather_pickled(tree, results)
        self._on_rank_0(folder, lambda: writer.finish(_copy(metadata), gathered))

    def _exchange_plans(
        self,
        tree: RankTree,
        folder: StorageFolder,
        local: SavePlan,
        planner: SavePlanner,
        writer: StorageWriter,
    ) -> None:
        """Let rank 0 decide which rank writes each chunk that several ranks have."""
        self._local = self._final = self._metadata = None  # if this fails, the next save repeats it
        gathered, finals = _gather_pickled(tree, local), list[SavePlan]()

        def merge() -> None:
            plans, self._metadata = planner.create_global_plan(gathered)
            finals.extend(writer.prepare_global_plan(plans))

        self._on_rank_0(folder, merge)
        if tree.size == 1:
            self._local, (self._final,) = local, finals
        else:
            final = tree.scatter([pickle.dumps(plan) for plan in finals])
            self._local, self._final = local, pickle.loads(final)
        self.exchanges += 1

    def _on_rank_0(self, folder: StorageFolder, function: Callable[[], None]) -> None:
        def call() -> None:
            with as_checkpoint_error(folder, "written"):
                function()

        run_on_rank_0(call, self.group)


def _gather_pickled(tree: RankTree, own: Any) -> list[Any]:
    """The objects of all ranks, on rank 0; an empty list on the others."""
    if tree.size == 1:  # nothing is sent, so nothing is pickled
        return [own]
    return [pickle.loads(content) for content in tree.gather(pickle.dumps(own))]


def _copy(metadata: Metadata | None) -> Metadata:
    """A copy, because DCP's writer sets fields of the metadata that it finishes."""
    assert metadata is not None  # on rank 0
    return dataclasses.replace(metadata)
