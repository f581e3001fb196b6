"""The parallel dimensions: their settings, their degrees, and the DeviceMesh built from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.rendezvous import explaining_failed_connections
from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive, Range


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism] Parallel degrees, and options of each kind of parallelism."""

    data_parallel_replicate_degree: Positive = 1  # replicas of the weights
    data_parallel_shard_degree: Annotated[int, Range(1, also=(-1,))] = -1
    # FSDP ranks that each replica is sharded over; -1: all remaining ranks
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # free all-gathered weights after forward: less memory, one more all-gather;
    # default: free those of all FSDP groups but the last; on one rank, or with pipeline parallel,
    # free none (torch's schedules keep at most three stages gathered)
    fsdp_gradient_reduction: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    # reduce accumulated gradients after every micro-batch (least memory) or only after the last
    # (least traffic); with pipeline parallel, one run of the schedule counts as a micro-batch
    tensor_parallel_degree: Positive = 1
    # ranks that shard each weight matrix, and the sequence outside the matmuls
    disable_loss_parallel: bool = False  # all-gather the logits instead of computing a sharded loss
    enable_async_tensor_parallel: bool = False
    # overlap tensor-parallel communication with its matmuls; needs CUDA and compiled blocks
    pipeline_parallel_degree: Positive = 1  # ranks that the blocks are partitioned over
    module_fqns_per_model_part: list[list[str]] | None = None
    # modules of each pipeline stage; unset: computed from the other keys
    pipeline_parallel_first_stage_less_layers: NotNegative | None = None
    # how many fewer blocks the first stage has than others, because it has the embedding; if this
    # and the next two keys are unset: stages are balanced by cost
    pipeline_parallel_last_stage_less_layers: NotNegative | None = None
    # the same for the last stage, because it has the output layer and the loss
    pipeline_parallel_layers_per_stage: Positive | None = None
    # blocks per stage, which sets the number of stages; unset: one stage a rank, or two if the
    # schedule needs several
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    # order of the forward and backward passes; the last three need torch 2.13 or later
    pipeline_parallel_schedule_csv: str = ""
    # CSV file of a schedule to use instead: one line a rank, such as 0F0,0F1,0B0,0B1
    pipeline_parallel_microbatch_size: Positive = 1
    # sequences in one pipeline micro-batch; divides training.local_batch_size
    context_parallel_degree: Positive = 1  # ranks that each sequence is sharded over
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    # headtail: each rank has an early and a late chunk of a sequence, as causal attention to late
    # tokens is more expensive; none: one chunk
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    # exchange of keys and values: one all-gather, or around a ring (less memory)
    expert_parallel_degree: Positive = 1
    # ranks that the experts of a block are partitioned over; they are borrowed from the data-shard,
    # context and tensor ranks, and divide their product
    expert_tensor_parallel_degree: Positive = 1
    # tensor ranks that each expert is sharded over, with expert parallel: 1 (the tensor ranks are
    # borrowed too) or tensor_parallel_degree; without it, always tensor_parallel_degree


class ParallelDimension(NamedTuple):
    """One dimension of the DeviceMesh."""

    name: str  # field of `Degrees`, and dimension name in the DeviceMesh
    key: str  # key of its degree in [parallelism]
    label: str  # in logs


# From the outermost to the innermost dimension: the ranks of the last one are adjacent, because
# tensor parallel communicates most, and pipeline stages, which communicate least, are far apart.
DIMENSIONS = (
    ParallelDimension("pipeline", "pipeline_parallel_degree", "PP"),
    ParallelDimension("replicate", "data_parallel_replicate_degree", "replicate"),
    ParallelDimension("shard", "data_parallel_shard_degree", "FSDP"),
    ParallelDimension("context", "context_parallel_degree", "CP"),
    ParallelDimension("tensor", "tensor_parallel_degree", "TP"),
)


@dataclass(frozen=True)
class Degrees:
    """Resolved size of each parallel dimension; their product is the number of ranks."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    # The next two are borrowed from `shard`, `context` and `tensor`, so they do not multiply the
    # number of ranks.
    expert: int = 1  # ranks that the experts are partitioned over
    expert_tensor: int = 1  # tensor ranks that each expert is sharded over, if `expert` > 1

    @property
    def expert_tensor_ranks(self) -> int:
        """Tensor ranks that each expert is sharded over, with and without expert parallel."""
        return self.tensor if self.expert == 1 else self.expert_tensor

    @property
    def expert_shard(self) -> int:
        """FSDP ranks of the experts: shard x context x tensor / (expert x expert_tensor_ranks)."""
        borrowed = self.shard * self.context * self.tensor
        return borrowed // (self.expert * self.expert_tensor_ranks)

    @property
    def batch(self) -> int:
        """Data-parallel ranks: those that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return math.prod(getattr(self, dimension.name) for dimension in DIMENSIONS)

    def __str__(self) -> str:
        sizes = ((dimension.label, getattr(self, dimension.name)) for dimension in DIMENSIONS)
        shown = " x ".join(f"{label} {size}" for label, size in sizes if size > 1) or "one process"
        if self.expert == 1:
            return shown
        own = (("FSDP", self.expert_shard), ("EP", self.expert), ("TP", self.expert_tensor))
        experts = " x ".join(f"{label} {size}" for label, size in own if size > 1)
        return f"{shown} (experts: {experts})"


def resolve_degrees(section: ParallelismConfig, ranks: int) -> Degrees:
    """Degrees of a [parallelism] section on `ranks` ranks; raises ConfigError on a mismatch."""
    configured = {d.name: getattr(section, d.key) for d in DIMENSIONS}
    others = math.prod(size for name, size in configured.items() if name != "shard")
    remaining, remainder = divmod(ranks, others)
    if configured["shard"] == -1 and not remainder:
        configured["shard"] = remaining
    degrees = Degrees(
        **configured,
        expert=section.expert_parallel_degree,
        expert_tensor=section.expert_tensor_parallel_degree,
    )
    if degrees.ranks == ranks:
        _check_expert_degrees(degrees)
        return degrees
    shown = " x ".join(
        f"{d.key} {size}"
        for d in DIMENSIONS
        if (size := configured[d.name]) > 1 or (d.name == "shard" and size > 0)
    )
    mismatch = "does not divide" if degrees.shard == -1 else f"is {degrees.ranks}, not"
    raise ConfigError(
        f"parallelism: {shown} {mismatch} the number of ranks, {ranks}.",
        fix="Change a degree (parallelism.data_parallel_shard_degree = -1 takes all remaining"
        " ranks) or --nproc_per_node.",
    )


def _check_expert_degrees(degrees: Degrees) -> None:
    """Raise ConfigError if the experts cannot borrow their ranks."""
    expert, expert_tensor = degrees.expert, degrees.expert_tensor
    if expert_tensor not in (1, degrees.tensor):
        raise ConfigError(
            f"parallelism.expert_tensor_parallel_degree = {expert_tensor}: must be 1 or"
            f" parallelism.tensor_parallel_degree = {degrees.tensor}."
        )
    # With the tensor ranks sharding each expert, only the others are left to borrow.
    borrowed = ("shard", "context") if expert_tensor > 1 else ("shard", "context", "tensor")
    available = math.prod(getattr(degrees, name) for name in borrowed)
    if available % expert:
        keys = {d.name: f"parallelism.{d.key}" for d in DIMENSIONS}
        shown = " x ".join(f"{keys[name]} {getattr(degrees, name)}" for name in borrowed)
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {expert}: does not divide the {available} ranks"
            f" that it is borrowed from, {shown}.",
            fix=f"Use a divisor of {available}.",
        )


@dataclass(frozen=True)
class ExpertMesh:
    """Sub-meshes of the experts; without expert parallel, those of all other weights."""

    ep_tp: DeviceMesh  # ranks that the experts are divided over before FSDP:
    # [expert], [expert, expert_tensor] or [tensor]
    fsdp: DeviceMesh  # ranks that weights are sharded over; [replicate, expert_shard] with replicas
    exchange: DeviceMesh | None  # ranks that the experts are partitioned over; None: no partition


@dataclass(frozen=True)
class Mesh:
    """Sub-meshes by purpose, for the collectives on tensors. All exist, also with one rank."""

    degrees: Degrees
    batch: DeviceMesh  # ranks that read different samples
    loss: DeviceMesh  # ranks whose losses add up to the loss of the global batch
    fsdp: DeviceMesh  # ranks that weights are sharded over; [replicate, sharded] with replicas
    cp: DeviceMesh  # ranks that each sequence is sharded over
    tp: DeviceMesh  # ranks that each matrix is sharded over
    pp: DeviceMesh  # ranks that the blocks are partitioned over
    experts: ExpertMesh

    @property
    def batch_rank(self) -> int:
        return self.batch.get_local_rank()


def coordinates_of(rank: int, degrees: Degrees) -> dict[str, int]:
    """Coordinate of a rank in each dimension of the mesh, from 0."""
    coordinates = {}
    for dimension in reversed(DIMENSIONS):
        rank, coordinates[dimension.name] = divmod(rank, getattr(degrees, dimension.name))
    return coordinates


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Build the DeviceMesh of all ranks and its sub-meshes."""
    names = tuple(dimension.name for dimension in DIMENSIONS)
    shape = tuple(getattr(degrees, name) for name in names)
    world = init_device_mesh(device_type, shape, mesh_dim_names=names)
    merged: dict[tuple[str, ...], DeviceMesh] = {}

    def merge(name: str, *dimensions: str) -> DeviceMesh:
        """One dimension of several; the same one, with one NCCL communicator, for equal ranks."""
        several = tuple(d for d in dimensions if getattr(degrees, d) > 1)
        if several not in merged:  # `_flatten` is the only way (torch 2.11 to 2.15)
            merged[several] = world[dimensions]._flatten(name)
        return merged[several]

    # Context-parallel ranks see different tokens of one sequence, so FSDP shards over them too.
    sharded = merge("sharded", "shard", "context")
    fsdp = sharded
    if degrees.replicate > 1:  # hybrid-sharded data parallel: [replicate, sharded]
        # private; torch 2.13 deprecates the slice ["replicate", "sharded"], and has no other way
        fsdp = DeviceMesh._concatenate([world["replicate"], sharded])
    return Mesh(
        degrees,
        batch=merge("batch", "replicate", "shard"),
        # With pipeline stages: all but the last stage contribute a loss of 0.
        loss=merge("loss", "pipeline", "replicate", "shard", "context"),
        fsdp=fsdp,
        cp=world["context"],
        tp=world["tensor"],
        pp=world["pipeline"],
        experts=(
            _build_expert_mesh(degrees, device_type)
            if degrees.expert > 1
            else ExpertMesh(world["tensor"], fsdp, exchange=None)
        ),
    )


def connect_mesh(mesh: Mesh, device: torch.device, set_phase: Callable[[str], None]) -> None:
    """Let the ranks of each sub-mesh exchange a first message, in a phase that names them.

    NCCL connects ranks at their first collective. Without this, a wrong interface or a broken link
    would be a hang somewhere in the first step. Raises RendezvousError.
    """
    submeshes = {
        "PP": mesh.pp,
        "FSDP": mesh.fsdp,
        "CP": mesh.cp,
        "TP": mesh.tp,
        "EP": mesh.experts.exchange,
        "FSDP (experts)": mesh.experts.fsdp,
        "data-parallel": mesh.batch,
        "loss": mesh.loss,
    }
    connected: list[DeviceMesh] = []
    for label, submesh in submeshes.items():
        if submesh is None or submesh.size() == 1 or submesh in connected:
            continue
        set_phase(f"connect {label} ranks")
        with explaining_failed_connections(dist.get_rank(), submesh.size(), f"other {label} ranks"):
            all_reduce_sum(submesh, torch.zeros(1, device=device)).item()
        connected.append(submesh)


# The dimensions of the experts' mesh inside a pipeline stage and replica, from the outermost: the
# same ranks as [shard, context, tensor], divided in another way.
EXPERT_DIMENSIONS = ("expert_shard", "expert", "expert_tensor")
FSDP_DIMENSIONS = {"sharded", "expert_shard"}  # one is in the mesh of a weight that FSDP manages


def _build_expert_mesh(degrees: Degrees, device_type: str) -> ExpertMesh:
    """The sub-meshes of a second mesh of all ranks.

    FSDP requires that its mesh and that of a weight are parts of one mesh, so the replicas are in
    this one too.
    """
    names = ("pipeline", "replicate", *EXPERT_DIMENSIONS)
    shape = tuple(getattr(degrees, name) for name in names)
    world = init_device_mesh(device_type, shape, mesh_dim_names=names)
    shards_each_expert = degrees.expert_tensor > 1
    return ExpertMesh(
        ep_tp=world["expert", "expert_tensor"] if shards_each_expert else world["expert"],
        fsdp=world["replicate", "expert_shard"] if degrees.replicate > 1 else world["expert_shard"],
        exchange=world["expert"],
    )
