"""Degrees become a DeviceMesh, and the mesh becomes views named by what they are for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive, Range, Supported


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism] How the ranks share the work."""

    data_parallel_replicate_degree: Positive = 1  # copies of the weights
    data_parallel_shard_degree: Annotated[int, Range(1, also=(-1,))] = -1
    # ranks that the weights of one copy are sharded over; -1: all ranks that are left
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # free gathered weights between forward and backward: less memory, one more gather;
    # default: every block but the last group; none under pipeline parallel,
    # where torch keeps three of a rank's stages gathered at most
    fsdp_gradient_reduction: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    # when accumulated gradients are reduced: each time (least memory) or once (least traffic);
    # under pipeline parallel, a run of the schedule is what counts as a micro-batch here
    tensor_parallel_degree: Positive = 1  # ranks that share each matrix, and the sequence between
    disable_loss_parallel: bool = False  # gather the logits instead of sharding the loss with them
    enable_async_tensor_parallel: bool = False
    # overlap tensor-parallel communication with its matrix products; CUDA, compiled blocks
    pipeline_parallel_degree: Positive = 1  # ranks that the blocks are spread over
    module_fqns_per_model_part: list[list[str]] | None = None
    # modules of each pipeline stage; unset: cut by what the other keys say
    pipeline_parallel_first_stage_less_layers: NotNegative | None = None
    # blocks fewer in the first stage, for the embedding; both unset: cut by cost
    pipeline_parallel_last_stage_less_layers: NotNegative | None = None
    # blocks fewer in the last stage, for the output layer and the loss
    pipeline_parallel_layers_per_stage: Positive | None = None
    # blocks of a stage, and so the number of stages; unset: one stage a rank, or two if looped
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"  # order of forwards and backwards
    pipeline_parallel_schedule_csv: str = ""
    # a file with that order instead, a line a rank, such as 0F0,0F1,0B0,0B1
    pipeline_parallel_microbatch_size: Positive = 1
    # sequences of one pipeline micro-batch; divides training.local_batch_size
    context_parallel_degree: Positive = 1  # ranks that share each sequence
    context_parallel_load_balancer: Annotated[
        Literal["headtail", "ptrr", "none"],
        Supported(("headtail", "none"), "Balancing for document masks"),
    ] = "headtail"  # which parts of a sequence a rank takes: an early and a late one, or one
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    # how keys and values travel: all at once, or around a ring (less memory)
    expert_parallel_degree: Annotated[int, Range(1), Supported((1,), "Expert parallel")] = 1
    # ranks that share the experts
    expert_tensor_parallel_degree: Annotated[int, Supported((1,), "Expert parallel")] = 1
    # ranks that share one expert
    expert_parallel_comm_backend: Annotated[
        Literal["standard", "deepep"], Supported(("standard",), "Expert parallel")
    ] = "standard"  # how tokens travel to experts


@dataclass(frozen=True)
class Degrees:
    """Every degree as a number; their product is the number of ranks."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return math.prod(dataclasses.astuple(self))

    def __str__(self) -> str:
        named = (f"{name} {n}" for name, n in vars(self).items() if n > 1)
        return " x ".join(named) or "one process"


_KEYS = {  # the key of each degree
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "context": "context_parallel_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipeline_parallel_degree",
}


def resolve_degrees(section: ParallelismConfig, ranks: int) -> Degrees:
    """The degrees that a section means on `ranks` ranks; raises ConfigError."""
    wanted = {name: getattr(section, key) for name, key in _KEYS.items()}
    others = math.prod(n for name, n in wanted.items() if name != "shard")
    rest, exactly = divmod(ranks, others)
    if wanted["shard"] == -1 and rest and not exactly:
        wanted["shard"] = rest
    degrees = Degrees(**wanted)
    if degrees.shard > 0 and degrees.ranks == ranks:
        return degrees
    shown = {n: d for n, d in wanted.items() if d > 1 or (n == "shard" and d > 0)}
    written = " x ".join(f"{_KEYS[name]} {degree}" for name, degree in shown.items())
    verb = "does not divide" if degrees.shard == -1 else f"is {degrees.ranks}, not"
    raise ConfigError(
        f"parallelism: {written} {verb} the number of ranks, {ranks}.",
        fix="Change a degree (data_parallel_shard_degree = -1 takes what is left)"
        " or --nproc_per_node.",
        keys=tuple(f"parallelism.{key}" for key in _KEYS.values()),
    )


@dataclass(frozen=True)
class Mesh:
    """The one authority on who is whose neighbour. Every view exists, at size 1 too."""

    degrees: Degrees
    batch: DeviceMesh  # ranks that read different samples
    loss: DeviceMesh  # ranks whose loss sums add up to the whole batch's
    fsdp: DeviceMesh  # what weights are sharded over; [replicate, shard] where also replicated
    cp: DeviceMesh  # ranks that share each sequence
    tp: DeviceMesh  # ranks that share each matrix
    pp: DeviceMesh  # ranks that the blocks are spread over

    @property
    def batch_rank(self) -> int:
        return self.batch.get_local_rank()


ORDER = ("pipeline", "replicate", "shard", "context", "tensor")  # the last are adjacent ranks


def coordinates_of(rank: int, degrees: Degrees) -> dict[str, int]:
    """Where a rank is in the mesh, in each direction, from 0."""
    found = {}
    for name in reversed(ORDER):
        rank, found[name] = divmod(rank, getattr(degrees, name))
    return found


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """The mesh of all ranks: neighbours that talk the most are adjacent, stages are far apart."""
    shape = tuple(getattr(degrees, name) for name in ORDER)
    world = init_device_mesh(device_type, shape, mesh_dim_names=ORDER)
    # Ranks that share a sequence hold different tokens, so weights are sharded over them too.
    # `_flatten` is the only way to one dimension made of several (torch 2.11 to 2.15).
    sharded = world["shard", "context"]._flatten("sharded")
    return Mesh(
        degrees,
        batch=world["replicate", "shard"]._flatten("batch"),
        # Every stage has a part of the loss: all but the last have none of it.
        loss=world["pipeline", "replicate", "shard", "context"]._flatten("loss"),
        fsdp=_replicated(world, sharded) if degrees.replicate > 1 else sharded,
        cp=world["context"],
        tp=world["tensor"],
        pp=world["pipeline"],
    )


def _replicated(world: DeviceMesh, sharded: DeviceMesh) -> DeviceMesh:
    if hasattr(DeviceMesh, "_concatenate"):  # 2.13 and later, where the other way is deprecated
        return DeviceMesh._concatenate([world["replicate"], sharded])
    return world["replicate", sharded.mesh_dim_names[0]]
