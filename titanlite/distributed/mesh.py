"""The parallel dimensions: their settings, their degrees, and the DeviceMesh built from them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive, Range, Supported


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism] Parallel degrees, and options of each kind of parallelism."""

    data_parallel_replicate_degree: Positive = 1  # replicas of the weights
    data_parallel_shard_degree: Annotated[int, Range(1, also=(-1,))] = -1
    # FSDP ranks that each replica is sharded over; -1: all remaining ranks
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # free all-gathered weights after forward: less memory, one more all-gather;
    # default: free those of all FSDP groups but the last; with pipeline parallel free none, but
    # torch keeps at most three stages of a rank gathered
    fsdp_gradient_reduction: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    # reduce accumulated gradients after every micro-batch (least memory) or only after the last
    # (least traffic); with pipeline parallel, one run of the schedule counts as a micro-batch
    tensor_parallel_degree: Positive = 1
    # ranks that shard each weight matrix, and the sequence outside the matmuls
    disable_loss_parallel: bool = False  # all-gather the logits instead of computing a sharded loss
    enable_async_tensor_parallel: bool = False
    # overlap tensor-parallel communication with its matmuls; CUDA, compiled blocks
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
    context_parallel_load_balancer: Annotated[
        Literal["headtail", "ptrr", "none"],
        Supported(("headtail", "none"), "Balancing for document masks"),
    ] = "headtail"
    # headtail: each rank has an early and a late chunk of a sequence, as causal attention to late
    # tokens is more expensive; none: one chunk
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    # exchange of keys and values: one all-gather, or around a ring (less memory)
    expert_parallel_degree: Annotated[int, Range(1), Supported((1,), "Expert parallel")] = 1
    # ranks that the experts are partitioned over
    expert_tensor_parallel_degree: Annotated[int, Supported((1,), "Expert parallel")] = 1
    # ranks that each expert is sharded over
    expert_parallel_comm_backend: Annotated[
        Literal["standard", "deepep"], Supported(("standard",), "Expert parallel")
    ] = "standard"  # implementation of the token exchange between experts


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

    @property
    def data(self) -> int:
        """Data-parallel ranks: those that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return math.prod(dataclasses.astuple(self))

    def __str__(self) -> str:
        sizes = ((dimension.label, getattr(self, dimension.name)) for dimension in DIMENSIONS)
        return " x ".join(f"{label} {size}" for label, size in sizes if size > 1) or "one process"


def resolve_degrees(section: ParallelismConfig, ranks: int) -> Degrees:
    """Degrees of a [parallelism] section on `ranks` ranks; raises ConfigError on a mismatch."""
    configured = {d.name: getattr(section, d.key) for d in DIMENSIONS}
    others = math.prod(size for name, size in configured.items() if name != "shard")
    remaining, remainder = divmod(ranks, others)
    if configured["shard"] == -1 and remaining and not remainder:
        configured["shard"] = remaining
    degrees = Degrees(**configured)
    if degrees.shard > 0 and degrees.ranks == ranks:
        return degrees
    shown = " x ".join(
        f"{d.key} {size}"
        for d in DIMENSIONS
        if (size := configured[d.name]) > 1 or (d.name == "shard" and size > 0)
    )
    mismatch = "does not divide" if degrees.shard == -1 else f"is {degrees.ranks}, not"
    raise ConfigError(
        f"parallelism: {shown} {mismatch} the number of ranks, {ranks}.",
        fix="Change a degree (data_parallel_shard_degree = -1 takes all remaining ranks)"
        " or --nproc_per_node.",
        keys=tuple(f"parallelism.{d.key}" for d in DIMENSIONS),
    )


@dataclass(frozen=True)
class Mesh:
    """Sub-meshes by purpose, for the collectives on tensors. All exist, also with one rank."""

    degrees: Degrees
    batch: DeviceMesh  # ranks that read different samples
    loss: DeviceMesh  # ranks whose losses add up to the loss of the global batch
    fsdp: DeviceMesh  # ranks that weights are sharded over; [replicate, shard] with replicas
    cp: DeviceMesh  # ranks that each sequence is sharded over
    tp: DeviceMesh  # ranks that each matrix is sharded over
    pp: DeviceMesh  # ranks that the blocks are partitioned over

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
    # Context-parallel ranks see different tokens of one sequence, so FSDP shards over them too.
    # `_flatten` is the only way to merge dimensions into one (torch 2.11 to 2.15).
    sharded = world["shard", "context"]._flatten("sharded")
    return Mesh(
        degrees,
        batch=world["replicate", "shard"]._flatten("batch"),
        # With pipeline stages: all but the last stage contribute a loss of 0.
        loss=world["pipeline", "replicate", "shard", "context"]._flatten("loss"),
        fsdp=_add_replicas(world, sharded) if degrees.replicate > 1 else sharded,
        cp=world["context"],
        tp=world["tensor"],
        pp=world["pipeline"],
    )


def _add_replicas(world: DeviceMesh, sharded: DeviceMesh) -> DeviceMesh:
    """The mesh [replicate, sharded] of hybrid-sharded data parallel."""
    if hasattr(DeviceMesh, "_concatenate"):  # torch 2.13 and later deprecate the slice below
        return DeviceMesh._concatenate([world["replicate"], sharded])
    return world["replicate", "sharded"]
