"""Degrees become a DeviceMesh, and the mesh becomes views named by what they are for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlite.errors import ConfigError
from titanlite.settings import Built, Positive, Range


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism] How the ranks share the work."""

    data_parallel_replicate_degree: Positive = 1  # copies of the weights
    data_parallel_shard_degree: Annotated[int, Range(1, also=(-1,))] = -1
    # ranks that the weights of one copy are sharded over; -1: all ranks that are left
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    # free gathered weights between forward and backward: less memory, one more gather;
    # default: every block but the last group
    fsdp_gradient_reduction: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    # when accumulated gradients are reduced: each time (least memory) or once (least traffic)
    tensor_parallel_degree: Positive = 1  # ranks that share each matrix, and the sequence between
    disable_loss_parallel: bool = False  # gather the logits instead of sharding the loss with them
    enable_async_tensor_parallel: Annotated[bool, Built((False,), "Async tensor parallel")] = False
    # overlap tensor-parallel communication with its matrix products
    pipeline_parallel_degree: Annotated[int, Range(1), Built((1,), "Pipeline parallel")] = 1
    # ranks that the blocks are spread over
    module_fqns_per_model_part: Annotated[
        list[list[str]] | None, Built((None,), "Pipeline parallel")
    ] = None  # modules of each pipeline stage
    pipeline_parallel_first_stage_less_layers: Annotated[int, Built((1,), "Pipeline parallel")] = 1
    # blocks fewer in the first stage, for the embedding
    pipeline_parallel_last_stage_less_layers: Annotated[int, Built((1,), "Pipeline parallel")] = 1
    # blocks fewer in the last stage, for the output layer
    pipeline_parallel_layers_per_stage: Annotated[
        int | None, Built((None,), "Pipeline parallel")
    ] = None  # blocks of a stage
    pipeline_parallel_schedule: Annotated[str, Built(("1F1B",), "Pipeline parallel")] = "1F1B"
    # order of forwards and backwards
    pipeline_parallel_schedule_csv: Annotated[
        str | None, Built(("", None), "Pipeline parallel")
    ] = ""  # a schedule from a file
    pipeline_parallel_microbatch_size: Annotated[int, Built((1,), "Pipeline parallel")] = 1
    # sequences of one pipeline micro-batch
    context_parallel_degree: Annotated[int, Range(1), Built((1,), "Context parallel")] = 1
    # ranks that share each sequence
    context_parallel_load_balancer: Annotated[
        str | None, Built(("headtail",), "Context parallel")
    ] = "headtail"  # which parts of a sequence a rank takes
    context_parallel_rotate_method: Annotated[
        Literal["allgather", "alltoall"], Built(("allgather",), "Context parallel")
    ] = "allgather"  # how keys and values travel
    expert_parallel_degree: Annotated[int, Range(1), Built((1,), "Expert parallel")] = 1
    # ranks that share the experts
    expert_tensor_parallel_degree: Annotated[int, Built((1,), "Expert parallel")] = 1
    # ranks that share one expert
    expert_parallel_comm_backend: Annotated[
        Literal["standard", "deepep"], Built(("standard",), "Expert parallel")
    ] = "standard"  # how tokens travel to experts


@dataclass(frozen=True)
class Degrees:
    """Every degree as a number; their product is the number of ranks."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        named = {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}
        return " x ".join(f"{name} {n}" for name, n in named.items() if n > 1) or "one process"


def degrees_of(section: ParallelismConfig, ranks: int) -> Degrees:
    """The degrees that a section means on `ranks` ranks; raises ConfigError."""
    replicate, tensor = section.data_parallel_replicate_degree, section.tensor_parallel_degree
    shard, rest = section.data_parallel_shard_degree, ranks // (replicate * tensor)
    if shard == -1 and rest * replicate * tensor == ranks:
        shard = rest
    degrees = Degrees(replicate, shard, tensor)
    if shard > 0 and degrees.ranks == ranks:
        return degrees
    written = f"data_parallel_replicate_degree {replicate} x tensor_parallel_degree {tensor}"
    if shard != -1:
        written += f" x data_parallel_shard_degree {shard}"
    verb = "does not divide" if shard == -1 else f"is {math.prod((replicate, tensor, shard))}, not"
    raise ConfigError(
        f"parallelism: {written} {verb} the number of ranks, {ranks}.",
        fix="Change a degree (data_parallel_shard_degree = -1 takes what is left)"
        " or --nproc_per_node.",
        keys=(
            "parallelism.data_parallel_replicate_degree",
            "parallelism.data_parallel_shard_degree",
            "parallelism.tensor_parallel_degree",
        ),
    )


@dataclass(frozen=True)
class Mesh:
    """The one authority on who is whose neighbour. Every view exists, at size 1 too."""

    degrees: Degrees
    batch: DeviceMesh  # ranks that read different samples
    loss: DeviceMesh  # ranks whose loss sums add up to the whole batch's
    fsdp: DeviceMesh  # what weights are sharded over; [replicate, shard] where also replicated
    tp: DeviceMesh  # ranks that share each matrix

    @property
    def batch_rank(self) -> int:
        return self.batch.get_local_rank()


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """The mesh of all ranks; tensor-parallel neighbours are adjacent, as they talk the most."""
    shape = (degrees.replicate, degrees.shard, degrees.tensor)
    world = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "tensor"))
    # `_flatten` is the only way to one dimension made of several (torch 2.11 to 2.15)
    batch = world["replicate", "shard"]._flatten("batch")
    fsdp = world["replicate", "shard"] if degrees.replicate > 1 else world["shard"]
    return Mesh(degrees, batch=batch, loss=batch, fsdp=fsdp, tp=world["tensor"])
