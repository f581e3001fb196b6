"""Tensors to and from a folder through torch.distributed.checkpoint, for any layout.

The files are DCP's own, so that every tool that reads its checkpoints reads ours. What is added:
each file is on the disk and hashed when it is closed, and reading executes nothing: no pickle is
opened, neither DCP's `.metadata` nor those in its files.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.checkpoint import chunks as chunk_lists
from titanlite.checkpoint.chunks import Chunk, Chunks, dcp_metadata, list_chunks, read_chunks
from titanlite.checkpoint.manifest import DTYPES, FileRecord, TensorRecord, read_checkpoint_manifest
from titanlite.checkpoint.records import read_part
from titanlite.distributed.tensors import local_shard
from titanlite.errors import CheckpointError, UserError
from titanlite.storage import UNFINISHED, StorageFolder, StorageUnreachable

State = dict[str, dict[str, Any]]  # part -> name -> tensor

# Flattened, so that an optimizer's state is found by parameter name, whatever its groups are.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


# --- what is saved -------------------------------------------------------------------------------


def model_and_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> State:
    """The tensors themselves, not copies; reading into them is loading."""
    weights = get_model_state_dict(model, options=_BY_NAME)
    state: State = {"model": {name: _bare(weight) for name, weight in weights.items()}}
    if optimizer is not None:
        # Rates and decays come from the job, not from the checkpoint: only moments are kept. What
        # is not there yet (a fresh AdamW has none) is made here, to be read into.
        whole = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
        state["optimizer"] = {n: value for n, value in whole.items() if n.startswith("state.")}
    return state


def _bare(weight: Tensor) -> Tensor:
    """A weight in the same memory, without what a tensor may be wrapped in to travel (Float8)."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if not is_traceable_wrapper_subclass(local):  # torch's own question, though not a public one
        return weight
    inner = local_shard(local)
    if not isinstance(weight, DTensor):
        return inner
    whole = {"shape": weight.shape, "stride": weight.stride()}
    mesh, placements = weight.device_mesh, weight.placements
    return DTensor.from_local(inner, mesh, placements, run_check=False, **whole)


class HostStaging:
    """A copy of a state in host memory, in the same memory every time.

    Fresh memory costs more than copying into it: the kernel clears it page by page. With `pinned`,
    a CUDA device copies by itself, in the order of its stream: before whatever it is told next.
    """

    def __init__(self, pinned: bool):
        self.pinned, self.copies = pinned, {}

    def copy(self, state: State) -> State:
        """The state as it is now; call `ready` before reading it."""
        return {
            part: {name: self._copy(f"{part}.{name}", value) for name, value in tensors.items()}
            for part, tensors in state.items()
        }

    def ready(self) -> Callable[[], None]:
        """What waits, in another thread, until the copies are whole."""
        if not (self.pinned and torch.cuda.is_initialized()):
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def _copy(self, name: str, value: Tensor) -> Tensor:
        value = value.detach()
        copy = self.copies.get(name)
        if copy is None or copy.shape != value.shape or copy.dtype != value.dtype:
            copy = self.copies[name] = value.to("cpu", copy=True)
            if self.pinned and torch.cuda.is_initialized():
                _pin(local_shard(copy))
        else:
            local_shard(copy).copy_(local_shard(value), non_blocking=self.pinned)
        return copy


def _pin(tensor: Tensor) -> None:
    """Lock the pages of a tensor, which keeps its place (`pin_memory` would make another one)."""
    if tensor.numel():
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)


# --- writing -------------------------------------------------------------------------------------

Commit = Callable[[dict[str, FileRecord], dict[str, TensorRecord]], None]


def write_tensors(
    place: StorageFolder,
    state: State,
    group: dist.ProcessGroup | None,
    commit: Commit,
    check: Callable[[], object] = lambda: None,
) -> None:
    """Write the shards of all ranks of `group`, then `commit` on its first rank; all together.

    `check` is called on the first rank before the folder is touched, and raises where it must not.
    Raises CheckpointError on every rank where it fails on any; `place` is then no checkpoint.
    """
    with _named(place, "written"):
        dcp.save(
            state,
            storage_writer=_Writer(place, commit, check),
            planner=_HashingPlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )


def write_one_by_one(
    place: StorageFolder,
    tensors: Mapping[str, Tensor],
    load: Callable[[str], Tensor],
    commit: Commit,
) -> None:
    """Write tensors of which `tensors` has shape and type only, each loaded when its turn comes."""
    with _named(place, "written"), _quietly_alone():
        dcp.save(
            dict(tensors),
            storage_writer=_Writer(place, commit),
            planner=_LoadingPlanner(load),
            no_dist=True,
        )


@dataclass(frozen=True)
class _Hashes(WriteResult):
    """What a rank says of its files and tensors; rides on DCP's own gathering of results."""

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, int]


class _HashingPlanner(DefaultSavePlanner):
    def __init__(self):
        super().__init__()
        self.hashes: dict[str, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        assert isinstance(data, Tensor), f"{write_item.index.fqn}: only tensors are saved"
        data = data.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy()
        name = write_item.index.fqn
        self.hashes[name] = self.hashes.get(name, 0) + xxhash.xxh3_64_intdigest(raw)
        return data


class _LoadingPlanner(_HashingPlanner):
    def __init__(self, load: Callable[[str], Tensor]):
        super().__init__()
        self.load = load

    def lookup_object(self, index) -> Tensor:
        return self.load(index.fqn)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer into a fresh folder, with a commit at the end."""

    def __init__(
        self, place: StorageFolder, commit: Commit, check: Callable[[], object] = lambda: None
    ):
        super().__init__(place.path, sync_files=False)  # `place` syncs, whatever it is on
        self.place, self.commit, self.check = place, commit, check
        self.fs, self.path = _Files(place), place.path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # DCP's makes the folder, from every rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on the first rank while the others wait: the moment to touch the folder."""
        self.check()
        _make_room(self.place, sum(_bytes(item) for plan in plans for item in plan.items))
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        own = _Hashes(None, 0, None, self.fs.written, planner.hashes)
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, own])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for of_rank in results for result in of_rank]
        hashes = [result for result in every if isinstance(result, _Hashes)]
        super().finish(metadata, [[r for r in every if not isinstance(r, _Hashes)]])
        with self.fs.create_stream(self.place.file(chunk_lists.NAME), "wb") as stream:
            stream.write(list_chunks(metadata))
        files = {name: record for own in hashes for name, record in own.files.items()}
        tensors = {
            name: TensorRecord(
                list(about.size),
                str(about.properties.dtype).removeprefix("torch."),
                f"{sum(own.tensors.get(name, 0) for own in hashes) % 2**64:016x}",
            )
            for name, about in metadata.state_dict_metadata.items()
        }
        self.commit(files | self.fs.written, tensors)
        with suppress(OSError, StorageUnreachable):  # beside a manifest it means nothing
            self.place.delete(UNFINISHED)


def _make_room(place: StorageFolder, needed: int) -> None:
    """A fresh folder: writing over an old one could mix two generations after a crash."""
    if place.exists():
        place.remove(first="manifest.json")
    place.make()
    place.check_room(needed, fix="Make room, or keep fewer (checkpoint.keep_latest_k).")
    with place.writing(UNFINISHED):  # an empty file is there or not: no other name for it before
        pass
    place.settle()


def _bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "only tensors are saved"
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    return chunk.sizes.numel() * dtype.itemsize


class _Files(FileSystemBase):
    """A `StorageFolder` as DCP wants it; remembers what was written."""

    def __init__(self, place: StorageFolder):
        self.place, self.written = place, {}

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[Any]:
        assert mode == "wb", "DCP only writes through it"
        name = str(path).rpartition("/")[2]
        with self.place.writing(name) as stream:
            yield stream
        self.written[name] = FileRecord(stream.bytes, stream.hash)

    def concat_path(self, path, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path) -> str:
        return str(path)

    def rename(self, path, new_path) -> None:
        old, new = (str(p).rpartition("/")[2] for p in (path, new_path))
        self.place.rename_file(old, new)
        self.written[new] = self.written.pop(old)

    def mkdir(self, path) -> None:
        self.place.make()

    def exists(self, path) -> bool:
        return self.place.fs.exists(str(path))

    def rm_file(self, path) -> None:
        self.place.fs.rm_file(str(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True


# --- reading -------------------------------------------------------------------------------------


def read_tensors(
    place: StorageFolder,
    state: State,
    group: dist.ProcessGroup | None = None,
    *,
    reader: StorageReader | None = None,
    alone: bool = False,
) -> None:
    """Read into the tensors of a state, in place, whatever layout wrote them.

    All ranks of `group` do it together; `alone`, or where there are no ranks, it is one process.
    `reader` is for a folder that is not of ours.
    """
    alone = alone or not dist.is_initialized()
    names = [f"{part}.{name}" for part, tensors in state.items() for name in tensors]
    with _named(place, "read"), _quietly_alone():
        dcp.load(
            state,
            storage_reader=reader or _Reader(place, names),
            planner=_TensorPlanner(),
            process_group=None if alone else group,
            no_dist=alone,
        )


class _TensorPlanner(DefaultLoadPlanner):
    """DCP's planner, which would unpickle whatever is not a tensor."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: is not a tensor.")


class _Reader(StorageReader):
    """The tensors `names` of a checkpoint, without a pickle: see chunks.py and records.py."""

    def __init__(self, place: StorageFolder, names: Sequence[str]):
        self.place, self.names = place, names
        self.chunks: dict[str, Chunks] = {}
        self.problem: CheckpointError | None = None

    def read_metadata(self) -> Metadata:
        try:
            manifest = read_checkpoint_manifest(self.place, sizes=False)
            absent = [name for name in self.names if name not in manifest.tensors]
            if absent:
                some = ", ".join(absent[:4]) + ", ..." * (len(absent) > 4)
                raise CheckpointError(f"{self.place}: does not hold {some}.")
            self.chunks = read_chunks(self.place, manifest, self.names)
        except CheckpointError as error:
            self.problem = error  # raised here, DCP would log a traceback and raise another error
            return Metadata({})
        self.dtypes = {name: DTYPES[manifest.tensors[name].dtype] for name in self.names}
        return dcp_metadata(manifest, self.chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        if self.problem:
            raise self.problem

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[int, ReadItem, Chunk]]] = {}
        for item in plan.items:
            index = item.storage_index
            chunk = self.chunks[index.fqn][tuple(index.offset)]
            by_file.setdefault(chunk.file, []).append((chunk.start, item, chunk))
        for file, parts in by_file.items():
            with self.place.reading(file) as stream:
                for _, item, chunk in sorted(parts, key=lambda part: part[0]):
                    self._read_item(stream, item, chunk, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(
        self, stream: IO[bytes], item: ReadItem, chunk: Chunk, planner: LoadPlanner
    ) -> None:
        target, name = planner.resolve_tensor(item).detach(), item.storage_index.fqn
        try:
            read_part(stream, chunk, self.dtypes[name], item.storage_offsets, target)
        except ValueError as error:
            raise CheckpointError(
                f"{self.place}: is damaged: {name} in {chunk.file}: {error}."
            ) from None
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@contextmanager
def _quietly_alone() -> Iterator[None]:
    """Without a process group, which DCP supposes to be a mistake."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _named(place: StorageFolder, act: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as failure:  # a BaseException; DCP raises it on every rank
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, UserError):
            raise error.mark_on_all_ranks() from failure
        raise CheckpointError(
            f"{place}: could not be {act}: rank {rank}: {type(error).__name__}: {error}"
        ).mark_on_all_ranks() from failure
