"""Read tensors of a checkpoint through torch.distributed.checkpoint (DCP), into any layout.

Nothing is unpickled: neither DCP's `.metadata` nor the pickles in its shard files.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.checkpoint.chunks import Chunk, Chunks, read_chunks, to_dcp_metadata
from titanlite.checkpoint.dcp import (
    BaseStorageReader,
    as_checkpoint_error,
    call_on_all_ranks,
    completed_future,
    ignore_no_dist_warning,
)
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    damaged_checkpoint,
    read_checkpoint_manifest,
)
from titanlite.checkpoint.model_state import State
from titanlite.checkpoint.shard_files import read_part_of_chunk
from titanlite.errors import CheckpointError
from titanlite.storage import BinaryReader, StorageFolder


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
        with ignore_no_dist_warning():
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
    """Reads the tensors `names` of a checkpoint without unpickling: see chunks, shard_files."""

    def __init__(self, folder: StorageFolder, names: Sequence[str], lists_files: bool):
        self.folder, self.names, self.lists_files = folder, names, lists_files
        self.chunks: dict[str, Chunks] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.problem: CheckpointError | None = None

    def read_metadata(self) -> Metadata:
        try:
            manifest = read_checkpoint_manifest(self.folder, sizes=False, files=self.lists_files)
            missing = [name for name in self.names if name not in manifest.tensors]
            if missing:
                more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
                listed = ", ".join(missing[:4]) + more
                fix = "Set [model] as it was saved."
                if all(name.startswith("optimizer.") for name in missing):
                    fix = (
                        "Set [optimizer] as it was saved, or start its state from scratch:"
                        ' checkpoint.exclude_from_loading = ["optimizer"].'
                    )
                raise CheckpointError(
                    f"{self.folder}: does not contain {listed}, which this job has.", fix=fix
                )
            self.chunks = read_chunks(self.folder, manifest, self.names)
        except CheckpointError as error:
            self.problem = error  # if raised here, DCP would raise another error
            return Metadata({})
        self.dtypes = {name: DTYPE_OF_NAME[manifest.tensors[name].dtype] for name in self.names}
        return to_dcp_metadata(manifest, self.chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if self.problem:
            raise self.problem

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
        self, stream: BinaryReader, item: ReadItem, chunk: Chunk, planner: LoadPlanner
    ) -> None:
        target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
        try:
            read_part_of_chunk(stream, chunk, self.dtypes[name], item.storage_offsets, target)
        except ValueError as error:
            raise damaged_checkpoint(self.folder, f"{name} in {chunk.file}: {error}") from None
        planner.commit_tensor(item, target)
