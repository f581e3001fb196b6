"""One process of `benchmarks.control_plane`: everything that a rank exchanges, without a model."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy.random  # noqa: F401, used by torch; imported before the processes are forked
import torch
import torch._dynamo  # the same
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from titanlite.checkpoint import CheckpointConfig, Checkpointer, SaveRequest
from titanlite.distributed.collectives import AsyncMax
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.mesh import ParallelismConfig, build_mesh, resolve_degrees
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.distributed.rank_tree import RankTree
from titanlite.runtime import HeartbeatWatchdog
from titanlite.storage import StorageFolder

ROUNDS = 10  # of the agreement of a step
HEARTBEAT_SECONDS = 5.0
TENSORS = 25  # of the state that is saved; every rank has a chunk of each
CHUNK_VALUES = 64
TIMEOUT_SECONDS = 600
PARTS = ("exchange", "checkpoint")


class PhaseMeter:
    """CPU seconds, messages and bytes of this rank, and CPU seconds of the store, per phase.

    "cpu" is of all threads, "main" of the main thread.
    """

    def __init__(self, store_pid: int):
        self.phases: dict[str, dict[str, float]] = {}
        self._store_pid, self._messages, self._bytes = store_pid, 0, 0
        self._count("isend")
        self._count("irecv")

    @contextmanager
    def phase(self, name: str, rounds: int = 1) -> Iterator[None]:
        """Measure the block, per round; ranks begin it together once they can."""
        if dist.is_initialized():
            RankTree().max([0])
        before = self._read()
        yield
        after = self._read()
        if dist.is_initialized():
            RankTree().max([0])
        after["wall"] = time.monotonic()
        self.phases[name] = {key: (after[key] - before[key]) / rounds for key in after}

    def _read(self) -> dict[str, float]:
        return {
            "cpu": time.process_time(),
            "main": time.thread_time(),
            "messages": self._messages,
            "bytes": self._bytes,
            "store_cpu": _cpu_seconds(self._store_pid),
            "wall": time.monotonic(),
        }

    def _count(self, name: str) -> None:
        """Count the calls of a function of torch.distributed, and the bytes that they send."""
        function = getattr(dist, name)

        def counting(tensor: torch.Tensor, **where: object) -> object:
            self._messages += 1
            self._bytes += tensor.nbytes
            return function(tensor, **where)

        setattr(dist, name, counting)


@dataclass(frozen=True)
class RankArguments:
    """What one process needs to know."""

    rank: int
    ranks: int
    port: int  # of the store
    store_pid: int
    folder: Path
    parts: tuple[str, ...] = PARTS


def run_rank(args: RankArguments) -> None:
    """Start, and measure the parts; writes `rank_R.json`."""
    os.environ.update(
        RANK=str(args.rank),
        WORLD_SIZE=str(args.ranks),
        LOCAL_WORLD_SIZE=str(args.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(args.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    meter = PhaseMeter(args.store_pid)
    with ExitStack() as stack:
        with meter.phase("start"):
            comm = CommConfig(init_timeout_seconds=TIMEOUT_SECONDS)
            context = stack.enter_context(
                join_process_group(
                    torch.device("cpu"), comm, DebugConfig(), args.folder, ErrorReport()
                )
            )
            watchdog = HeartbeatWatchdog(
                args.rank, args.ranks, TIMEOUT_SECONDS, args.folder, context.start_id
            )
            if "exchange" in args.parts:  # else its heartbeats would take most of the cores
                stack.enter_context(watchdog)
            max_over_ranks = AsyncMax()
            checkpointer = _open_checkpointer(args.folder)
        if "exchange" in args.parts:
            _measure_exchange(meter, max_over_ranks)
            watchdog.leave()
        if "checkpoint" in args.parts:
            _measure_checkpoints(meter, checkpointer, args.ranks)
        RankTree().max([0])
        result = {"phases": meter.phases, "sockets": _count_sockets(), "private": _private_bytes()}
        (args.folder / f"rank_{args.rank}.json").write_text(json.dumps(result))
        RankTree().max([0])


def _open_checkpointer(folder: Path) -> Checkpointer:
    config = CheckpointConfig(
        enable=True,
        timeout_seconds=TIMEOUT_SECONDS,
        exclude_from_loading=["optimizer"],  # SGD has none
    )
    return Checkpointer(
        StorageFolder(folder / "checkpoint"), config, properties={}, job={}, layout=""
    )


def _measure_exchange(meter: PhaseMeter, max_over_ranks: AsyncMax) -> None:
    def agree() -> None:
        max_over_ranks.start(0, 0, 0, 0)
        max_over_ranks.wait()

    ring = dist.new_group(backend="gloo")

    def all_reduce() -> None:
        dist.all_reduce(torch.zeros(4, dtype=torch.int64), dist.ReduceOp.MAX, group=ring)

    with meter.phase("heartbeat", rounds=int(HEARTBEAT_SECONDS)):  # one a second
        time.sleep(HEARTBEAT_SECONDS)
    for name, function in (
        ("agreement of a step", agree),
        ("the same by gloo's all-reduce", all_reduce),
    ):
        function()  # connects
        with meter.phase(name, ROUNDS):
            for _ in range(ROUNDS):
                function()


def _measure_checkpoints(meter: PhaseMeter, checkpointer: Checkpointer, ranks: int) -> None:
    model = _sharded_parameters(ranks)
    optimizers = [torch.optim.SGD(model.parameters())]
    progress = {"step": 0, "position": 0, "tokens": 0}
    for step, name in enumerate(("first save", "next save"), 1):
        with meter.phase(name):
            checkpointer.save(SaveRequest(step, model, optimizers, progress | {"step": step}))
            saved = checkpointer.wait()
            assert saved is not None and not saved.problem, saved
    with meter.phase("find and verify"):
        found = checkpointer.find()
    assert found is not None
    with meter.phase("load"):
        checkpointer.load(found, model, optimizers, {})


def measure_mesh(ranks: int) -> float:
    """CPU seconds of one rank for the groups of a mesh of `ranks`; nothing is connected."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    started = time.process_time()
    config = ParallelismConfig(tensor_parallel_degree=math.gcd(8, ranks))
    build_mesh(resolve_degrees(config, ranks), "cpu")
    return time.process_time() - started


def _sharded_parameters(ranks: int) -> nn.ParameterList:
    mesh = init_device_mesh("cpu", (ranks,))
    chunks = [
        DTensor.from_local(torch.zeros(1, CHUNK_VALUES), mesh, [Shard(0)], run_check=False)
        for _ in range(TENSORS)
    ]
    return nn.ParameterList(nn.Parameter(chunk) for chunk in chunks)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _count_sockets() -> int:
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


def _private_bytes() -> int:
    """Memory that this process does not share with the others."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
