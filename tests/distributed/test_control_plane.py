"""What ranks exchange beside the data of the model does not grow with their number.

`scripts/control_plane.py` measures the same with hundreds of processes.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint.tensor_writer import CollectiveSave, write_tensors
from titanlite.distributed.collectives import (
    AsyncMax,
    broadcast_from_rank_0,
    gather_problems,
    run_on_rank_0,
)
from titanlite.distributed.rank_tree import FANOUT, RankTree, children_of, subtree_of
from titanlite.distributed.rendezvous import FANOUT_TO_JOIN, agree_on_start_id
from titanlite.errors import CheckpointError
from titanlite.runtime.diagnosis import FIRST_READERS, PeerDiagnosis
from titanlite.runtime.heartbeat import HeartbeatExchange, RankProgress
from titanlite.storage import StorageFolder

SIZES = (3, 6, 9)  # numbers of ranks to compare
DEEP = 8  # ranks for a tree of four levels


# --- the tree ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fanout", [FANOUT, FANOUT_TO_JOIN])
@pytest.mark.parametrize("size", [1, 2, 100, 16_384])
def test_every_rank_is_reached_once_in_a_logarithmic_number_of_levels(size, fanout):
    assert sorted(subtree_of(0, size, fanout)) == list(range(size))
    levels, rank = 1, size - 1  # the last rank is on the lowest level
    while rank:
        parent = (rank - 1) // fanout
        assert rank in children_of(parent, size, fanout)
        levels, rank = levels + 1, parent
    assert sum(fanout**level for level in range(levels - 1)) < size


def use_every_method() -> list:
    tree, rank = RankTree(), dist.get_rank()
    own = bytes([rank]) * (1000 * rank)  # rank 0 has none
    return [
        tree.max([rank, -rank]),
        tree.broadcast(b"" if rank else b"from rank 0"),
        tree.broadcast(b""),
        tree.gather(own),
        tree.scatter([b"%d" % other for other in range(dist.get_world_size())] if not rank else []),
    ]


def test_bytes_arrive_unchanged_from_and_at_every_rank():
    results = run_on_ranks(use_every_method, DEEP)
    for rank, (largest, text, nothing, gathered, own) in enumerate(results):
        assert largest == [DEEP - 1, 0] and text == b"from rank 0" and nothing == b""
        assert gathered == ([] if rank else [bytes([r]) * (1000 * r) for r in range(DEEP)])
        assert own == b"%d" % rank


# --- sockets -------------------------------------------------------------------------------------


def sockets() -> int:
    """Number of this process's open sockets."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own descriptor
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return count


def count_sockets_per_group() -> list[int]:
    """Sockets that each world-size group of a run adds, after it has been used in every way."""
    counts = []
    for _ in range(3):
        before = sockets()
        max_over_ranks = AsyncMax()
        group = max_over_ranks.group
        max_over_ranks.start(dist.get_rank())
        max_over_ranks.wait()
        for problem in ("", f"problem of rank {dist.get_rank()}"):
            gather_problems(problem, group)
        broadcast_from_rank_0({"step": 1}, group)
        run_on_rank_0(lambda: None, group)
        RankTree(group).scatter([b""] * dist.get_world_size())
        counts.append(sockets() - before)
    return counts


@pytest.mark.parametrize("ranks", SIZES)
def test_the_sockets_of_a_rank_do_not_grow_with_the_number_of_ranks(ranks):
    """Each group has one that listens, and one to the parent and to each child of the rank."""
    for rank, counts in enumerate(run_on_ranks(count_sockets_per_group, ranks, on_demand=True)):
        peers = len(children_of(rank, ranks)) + (rank > 0)
        assert counts == [1 + peers] * 3, f"rank {rank}"
        assert 1 + peers <= 2 + FANOUT


# --- messages ------------------------------------------------------------------------------------


def count_messages() -> dict[str, int]:
    """Point-to-point messages of this rank, by what causes them; nothing else may be sent."""
    sent: Counter = Counter()

    def record(cause: str, function) -> None:
        def counting(call, *args, **kwargs):
            sent[cause] += 1
            return call(*args, **kwargs)

        calls = {name: getattr(dist, name) for name in ("isend", "irecv")}
        others = ("all_gather_into_tensor", "all_reduce", "broadcast", "gather", "barrier")
        with pytest.MonkeyPatch.context() as patch:
            for name, call in calls.items():
                patch.setattr(dist, name, partial(counting, call))
            for name in others:
                patch.setattr(dist, name, None)
            function()

    max_over_ranks = AsyncMax()

    def agree() -> None:
        max_over_ranks.start(0, 1, 2, 3)
        max_over_ranks.wait()

    record("agreement of one step", agree)
    record("no problem on any rank", lambda: gather_problems(""))
    return dict(sent)


def test_the_messages_of_a_step_do_not_grow_with_the_number_of_ranks():
    for ranks in SIZES:
        for rank, sent in enumerate(run_on_ranks(count_messages, ranks)):
            peers = len(children_of(rank, ranks)) + (rank > 0)
            expected = {"agreement of one step": 2 * peers, "no problem on any rank": 2 * peers}
            assert sent == expected, f"rank {rank} of {ranks}"


# --- operations of the store ---------------------------------------------------------------------


class RecordingStore:
    """A store in this process that records the operations of one rank: (name, key)."""

    def __init__(self, values: dict[str, bytes]):
        self.values = values  # shared by the stores of all ranks
        self.operations: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self.operations.append(("set", key))
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.operations += [("check", key) for key in keys]
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.operations += [("get", key) for key in keys]
        return [self.values[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.check(keys) and time.monotonic() < deadline:
            time.sleep(0.001)


def store_with_heartbeats(ranks: int) -> RecordingStore:
    """A store in which every rank has sent one heartbeat."""
    values: dict[str, bytes] = {}
    store = RecordingStore(values)
    for rank in range(ranks):
        store.set(str(rank), json.dumps(RankProgress(rank, ranks, 1.0).heartbeat(0)))
    return RecordingStore(values)


def await_rounds(exchange: HeartbeatExchange, rounds: int) -> None:
    while exchange.rounds < rounds:
        time.sleep(0.01)


def operations_of_a_heartbeat(ranks: int) -> list[tuple[str, str]]:
    """What rank 1 of `ranks` does in the store at a heartbeat, once all have sent one."""
    store = store_with_heartbeats(ranks)
    exchange = HeartbeatExchange(store, RankProgress(1, ranks, 1.0))
    await_rounds(exchange, 2)
    exchange.close("done")
    _, second, third = [i for i, (name, _) in enumerate(store.operations) if name == "set"][:3]
    return store.operations[second:third]


def heartbeats_read_when_stuck(rank: int, ranks: int, verdict: str = "") -> int:
    """Heartbeats that a rank reads in one round, after 0.9 of the timeout without progress."""
    store, progress = store_with_heartbeats(ranks), RankProgress(rank, ranks, 1.0)
    if verdict:
        store.set("verdict", json.dumps([0, verdict]))
    exchange = HeartbeatExchange(store, progress)
    await_rounds(exchange, 1)
    progress.stuck_seconds = 0.9
    PeerDiagnosis(exchange, progress).find_problem()
    await_rounds(exchange, exchange.rounds + 2)
    start = len(store.operations)
    await_rounds(exchange, exchange.rounds + 2)
    exchange.close("done")
    read = [key for name, key in store.operations[start:] if name == "get" and key.isdigit()]
    return len(set(read))


def test_a_few_ranks_look_for_the_straggler_before_all_others_do():
    ranks = 1000
    stride = math.ceil(ranks / FIRST_READERS)
    assert heartbeats_read_when_stuck(0, ranks) == ranks
    assert heartbeats_read_when_stuck(stride, ranks) == ranks
    assert heartbeats_read_when_stuck(1, ranks) == 1
    assert heartbeats_read_when_stuck(stride, ranks, verdict="rank 7 has died") == 0
    assert heartbeats_read_when_stuck(1, FIRST_READERS) == FIRST_READERS


def test_a_heartbeat_takes_four_operations_of_the_store_whatever_the_number_of_ranks():
    expected = [("set", "1"), ("check", "verdict"), ("check", "2"), ("get", "2")]
    for ranks in (*SIZES, 1000):
        assert operations_of_a_heartbeat(ranks) == expected


def test_a_rank_that_sends_a_heartbeat_every_16_seconds_is_not_lost_after_10():
    few, many = (RankProgress(0, ranks, 600.0) for ranks in (8, 16_384))
    for progress in (few, many):
        progress.set_lost_after(10.0)
    assert few.silent_limit == 10 and many.silent_limit == 3 * many.heartbeat_seconds > 48


def test_a_rank_waits_only_for_its_children_to_join():
    ranks = 3 * FANOUT_TO_JOIN
    values: dict[str, bytes] = {}
    stores = [RecordingStore(values) for _ in range(ranks)]
    threads = [
        threading.Thread(target=agree_on_start_id, args=(store, rank, ranks, 30.0))
        for rank, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, store in enumerate(stores):
        keys = {key for _, key in store.operations}
        # Of a child: its nonce, the answer and its confirmation; the same three of the rank itself;
        # and that of rank 0, which says that all ranks have joined.
        assert len(keys) <= 3 * len(children_of(rank, ranks, FANOUT_TO_JOIN)) + 4
    assert len(values) == 3 * (ranks - 1) + 1


# --- saving --------------------------------------------------------------------------------------


def save_several_times(folder: str) -> list[tuple[str, int, int]]:
    """For each save: its error, the exchanges of plans so far, and the bytes that rank 0 moved."""
    mesh, rows = init_device_mesh("cpu", (dist.get_world_size(),)), torch.arange(64.0).view(-1, 4)
    saves = CollectiveSave(dist.new_group(backend="gloo"))

    def refuse() -> None:
        raise CheckpointError("no space.")

    outcomes = []
    for step, (names, prepare) in enumerate(
        (("ab", refuse), ("ab", int), ("ab", int), ("a", int), ("a", int)), 1
    ):
        # `a` is sharded; `b` is the same on all ranks, so one of them writes it
        tensors = {name: distribute_tensor(rows, mesh, [Shard(0)]) for name in names}
        tensors |= {"b": rows} if "b" in names else {}
        step_folder, moved = StorageFolder(f"{folder}/step-{step}"), []
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name in ("isend", "irecv"):
                    patch.setattr(dist, name, partial(_record_bytes, moved, getattr(dist, name)))
                write_tensors(step_folder, {"model": tensors}, saves, commit_nothing, prepare)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
        outcomes.append((problem, saves.exchanges, sum(moved)))
    return outcomes


def _record_bytes(moved: list[int], function, tensor: torch.Tensor, **where):
    moved.append(tensor.nbytes)
    return function(tensor, **where)


def commit_nothing(files: dict, tensors: dict) -> None:
    assert {f"__{rank}_0.distcp" for rank in range(3)} <= set(files)


def test_ranks_exchange_their_plans_only_when_one_has_changed(tmp_path):
    for outcomes in run_on_ranks(save_several_times, 3, str(tmp_path)):
        problems, exchanges, moved = zip(*outcomes, strict=True)
        assert problems == ("no space.", "", "", "", "")
        # A save that failed before any rank wrote has agreed on the plans already.
        assert exchanges == (1, 1, 1, 2, 2)
        assert moved[4] < moved[3]
    for step in range(2, 6):
        files = sorted(path.name for path in (tmp_path / f"step-{step}").iterdir())
        assert files == sorted([".metadata", "chunks.json", *(f"__{r}_0.distcp" for r in range(3))])
