"""Compare, bit by bit, the state that several ranks must have in common.

That is: weights, buffers and optimizer state across replicas (HSDP, and what tensor parallel does
not shard), and counters, generators and all else that a checkpoint stores as JSON across all ranks.
Each rank hashes its state on the device; while all agree, it receives 100 bytes of every rank.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.data.random_bits import GOLDEN, hash_key, mix
from titanlite.distributed.collectives import (
    broadcast_from_rank_0,
    gather_from_all_ranks,
    local_shard,
)
from titanlite.distributed.mesh import EXPERT_DIMENSIONS, Degrees, Mesh, coordinates_of
from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import TrainingDiverged
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.state import TrainState

# Values are grouped by the dimensions of the mesh over which they may differ: each pipeline rank
# has parameters of its own, and each rank of FSDP ("sharded") and of TP has shards of its own.
SHARDINGS = (
    ("pipeline",),
    ("pipeline", "sharded"),
    ("pipeline", "tensor"),
    ("pipeline", "sharded", "tensor"),
    (),
)
MAX_FINDINGS = 8  # reported at a time
ROW = 1 << 16  # elements that are multiplied by the same factors, row after row
ROWS = {"cuda": 64, "cpu": 1}  # at a time: temporary memory of 32 MiB on a GPU; a CPU's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by element size


class ReplicaFinding(NamedTuple):
    """Ranks whose state differs from that of their replicas."""

    ranks: list[int]  # the minority; all replicas where no majority agrees
    hosts: list[str]  # of these ranks
    replicas: int  # number of ranks that were compared
    value: str  # the first that differs: a parameter, "exp_avg of PARAMETER", or a counter

    def __str__(self) -> str:
        ranks = ", ".join(map("{} ({})".format, self.ranks, self.hosts))
        return f"{self.value} on rank {ranks}, of {self.replicas} replicas"


class ReplicaCheck:
    """Finds the ranks whose state differs from that of their replicas."""

    def __init__(self, state: TrainState, mesh: Mesh):
        self._state, self._mesh = state, mesh
        self._replicas = _group_replicas(mesh.degrees)

    def find(self) -> list[ReplicaFinding]:
        """The findings, on every rank; a collective of all ranks. Empty if replicas are equal."""
        hashes = self._hash_state()
        digests = gather_from_all_ranks(self._digest(hashes))
        different = [
            (index, ranks)
            for index, ranks in self._replicas
            if len({digests[rank][index] for rank in ranks}) > 1
        ][:MAX_FINDINGS]
        if not different:
            return []
        own = [
            {name: value.item() for name, value in hashes[index].items()}
            if dist.get_rank() in ranks
            else {}
            for index, ranks in different
        ]
        texts = RankTree().gather(json.dumps([socket.gethostname(), own]).encode())
        reports = [json.loads(text) for text in texts]  # none on ranks other than 0
        findings = reports and [  # the broadcast ignores the empty list of other ranks
            find_differing_ranks(
                {rank: reports[rank][1][number] for rank in ranks}, [host for host, _ in reports]
            )
            for number, (_, ranks) in enumerate(different)
        ]
        return [ReplicaFinding(*finding) for finding in broadcast_from_rank_0(findings)]

    def _hash_state(self) -> list[dict[str, Tensor]]:
        """name -> hash of each value, for each of `SHARDINGS`."""
        hashes: list[dict[str, Tensor]] = [{} for _ in SHARDINGS]
        for name, value, parameter in _tensors(self._state):
            group = hashes[SHARDINGS.index(("pipeline", *_differs_over(value, parameter)))]
            is_tensor = isinstance(value, Tensor)
            group[name] = hash_bits(local_shard(value)) if is_tensor else _hash_text(repr(value))
        for name, value in self._state.progress().items():
            hashes[-1][name] = _hash_text(json.dumps(value))
        return hashes

    def _digest(self, hashes: list[dict[str, Tensor]]) -> list[int]:
        """One hash of the values of each of `SHARDINGS`; 0 where there are none."""
        device = self._mesh.fsdp.device_type
        values = [[group[name].to(device) for name in sorted(group)] for group in hashes]
        none = torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack([hash_bits(torch.stack(v)) if v else none for v in values]).tolist()


def build_replica_check(metered: MeteredRun) -> Meter | None:
    """Check every `replica_check.freq` steps and before each save."""
    run, config = metered.run, metered.replica_check
    mesh, saves = run.step_settings.mesh, run.checkpointer
    if not config.freq or mesh.degrees.ranks == 1:
        return None
    check = ReplicaCheck(run.state, mesh)

    def compare(info: StepInfo) -> None:
        findings = check.find()
        for finding in findings:
            run.sinks.event(info.step, "replica_mismatch", **finding._asdict())
        if findings and config.action == "stop":
            run.finish_save(info.step)  # of an earlier step
            raise TrainingDiverged(
                f"replicas differ at step {info.step}: {'; '.join(map(str, findings))}.",
                fix="This state was not saved. A device or its memory computed or stored a wrong"
                " bit: take that host out of the job and test it, then run the same command again."
                " It resumes from the newest checkpoint, if there is one.",
            ).mark_on_all_ranks()

    def is_due(info: StepInfo) -> bool:
        due = (saves.due, saves.due_in_memory)
        return info.step % config.freq == 0 or any(f(info.step, info.ends_run) for f in due)

    # named "save": before the save of an abandoned step, too
    return Meter(PeriodicAction("save", is_due, compare, needs_accepted=True))


def _hash_text(text: str) -> Tensor:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "big", signed=True))


def _tensors(state: TrainState) -> Iterator[tuple[str, Any, Tensor]]:
    """(name, tensor or number, its parameter) of all weights, saved buffers, optimizer state."""
    optimizer_state, saved = state.optimizer.state, state.model.state_dict().keys()
    for name, buffer in state.model.named_buffers():
        if name in saved:  # others, such as counters of a step, may differ between ranks
            yield name, buffer, buffer
    for name, parameter in state.model.named_parameters():
        yield name, parameter, parameter
        for key, value in optimizer_state.get(parameter, {}).items():
            yield f"{key} of {name}", value, parameter


def _differs_over(value: Any, parameter: Tensor) -> list[str]:
    """The dimensions of the mesh over which a value of `_tensors` may differ, as in `SHARDINGS`."""
    tensor = value if isinstance(value, DTensor) else parameter
    if not isinstance(tensor, DTensor):
        return []
    if isinstance(value, Tensor) and value.dim() > 0 and not isinstance(value, DTensor):
        # Of all ranks that shard matrices, only the owner of this one has the state of the whole.
        return ["sharded", "tensor"]
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    placed = zip(names, tensor.placements, strict=True)
    sharding = {name for name, placement in placed if not placement.is_replicate()}
    # Experts on a mesh of their own are sharded over all ranks of a replica.
    return ["sharded", "tensor"] if sharding & set(EXPERT_DIMENSIONS) else sorted(sharding)


def _group_replicas(degrees: Degrees) -> list[tuple[int, list[int]]]:
    """(index in `SHARDINGS`, ranks that must have the same values of it)."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(degrees.ranks):
        at = coordinates_of(rank, degrees)
        at["sharded"] = at["shard"] * degrees.context + at["context"]
        for index, dimensions in enumerate(SHARDINGS):
            place = tuple(at[dimension] for dimension in dimensions)
            groups.setdefault((index, place), []).append(rank)
    return [(index, ranks) for (index, _), ranks in groups.items()]


def find_differing_ranks(hashes: dict[int, dict[str, int]], hosts: Sequence[str]) -> ReplicaFinding:
    """The ranks that differ from the majority of their replicas; all if there is no majority.

    `hashes`: rank -> name -> hash; `hosts`: of all ranks.
    """
    content = {rank: tuple(sorted(values.items())) for rank, values in hashes.items()}
    (common, count), *_ = Counter(content.values()).most_common(1)
    majority = count > len(hashes) / 2
    ranks = [rank for rank in hashes if not majority or content[rank] != common]
    names: Iterable[str] = dict.fromkeys(name for values in hashes.values() for name in values)
    first = next(name for name in names if len({v.get(name) for v in hashes.values()}) > 1)
    return ReplicaFinding(ranks, [hosts[rank] for rank in ranks], len(hashes), first)


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """The hash of a plain tensor, a 0-d int64 on its device; does not wait for the device.

    The sum, modulo 2^64, of the elements' bits as integers, each times two odd pseudorandom
    numbers: of its row and of its place in the row. Odd factors are invertible, so any change of
    one element changes the hash. A change of several is missed with a probability of about 2^-32.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    factors, whole = _odd_factors(0, ROW, bits.device), bits.numel() // ROW * ROW
    rows, rest = bits[:whole].view(whole // ROW, ROW), bits[whole:]
    sums = [(part * factors).sum(1) for part in rows.split(ROWS[bits.device.type])]
    sums.append((rest * factors[: rest.numel()]).sum().view(1))
    each = torch.cat(sums)
    return (each * _odd_factors(1, each.numel(), each.device)).sum()


@cache
def _odd_factors(seed: int, count: int, device: torch.device) -> Tensor:
    """Pseudorandom odd numbers, the same on every rank."""
    bits = mix(np.arange(count, dtype=np.uint64) * GOLDEN + hash_key(str(seed)))
    return torch.from_numpy(bits.view(np.int64) | 1).to(device)
