"""Estimate the seconds of one training step, and what they are spent on.

Every kernel takes what its FLOPs and bytes take at the GPU's efficiency, every collective what its
bytes take over the links that its group crosses. What runs at the same time is counted once: the
parameters of the next block are gathered while this block computes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from titanlite.models import ModelShape
from titanlite.planning.activation_memory import BlockActivations
from titanlite.planning.block_time import (
    BlockCase,
    Passes,
    Seconds,
    block_case,
    block_passes,
    embedding_passes,
    output_passes,
)
from titanlite.planning.collective_time import CollectiveTimes
from titanlite.planning.efficiency import Efficiency, find_efficiency
from titanlite.planning.hardware import Cluster
from titanlite.planning.kernel_time import KernelTimes
from titanlite.planning.pipeline_time import divide_layers, idle_seconds
from titanlite.planning.stages import stage_ranks
from titanlite.planning.workload import Workload

HOST_OPTIMIZER_GB_PER_S = 100.0
# of host memory, for the offloaded optimizer of one GPU: an assumption, not measured


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the busiest rank; communication is what computing does not hide."""

    matmuls: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    shard: float = 0.0
    replicate: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    @property
    def communication(self) -> float:
        """Exposed communication of all dimensions."""
        return (
            self.tensor + self.context + self.expert + self.pipeline + self.shard + self.replicate
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, without those that are 0."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@lru_cache(maxsize=256)
def _speeds(cluster: Cluster, efficiency: Efficiency) -> tuple[KernelTimes, CollectiveTimes]:
    return KernelTimes(cluster.gpu, efficiency), CollectiveTimes(cluster, efficiency)


def estimate_step(
    workload: Workload, cluster: Cluster, efficiency: Efficiency | None = None
) -> StepTime:
    """The time of one step; without `efficiency`, at that of the GPU type."""
    efficiency = efficiency or find_efficiency(cluster.gpu.name)
    kernels, collectives = _speeds(cluster.resized(0), efficiency)
    case = block_case(workload, kernels, collectives)
    ranks = _rank_passes(workload, case)
    layout = workload.layout
    costs = [passes.total for passes in ranks]
    busiest = ranks[costs.index(max(costs))]
    both = busiest.forward.plus(busiest.backward)
    of_run = layout.n_microbatches // layout.runs
    bubble = layout.runs * idle_seconds(
        layout.schedule, layout.pipeline, layout.stages_per_rank, of_run, costs
    )
    many = layout.n_microbatches
    shard, replicate = _gradient_seconds(workload, case, busiest)
    return StepTime(
        matmuls=both.matmul * many,
        attention=both.attention * many,
        memory_bound=both.memory * many,
        tensor=both.tensor * many,
        context=both.context * many,
        expert=both.expert * many,
        pipeline=_transfer_seconds(workload, case, busiest),
        shard=both.shard * many + shard,
        replicate=replicate,
        bubble=bubble,
        optimizer=_optimizer_seconds(workload, kernels),
        offload=_offload_seconds(workload, cluster, busiest),
        checkpoint=_checkpoint_seconds(workload, cluster),
    )


def _rank_passes(workload: Workload, case: BlockCase) -> list[Passes]:
    """One micro-batch on each pipeline rank."""
    layout, model = workload.layout, workload.model
    dense_layers = model.n_layers if model.experts is None else model.experts.dense_layers
    sparse = _with_gathers(workload, case, dense_layers == model.n_layers)
    dense = _with_gathers(workload, case, True) if dense_layers else sparse
    ends = embedding_passes(case), output_passes(case)
    stages = layout.pipeline * layout.stages_per_rank
    block = sparse.total
    layers = layout.stage_blocks or divide_layers(
        model.n_layers, stages, *(round(end.total / block, 2) for end in ends)
    )
    ranks = [Passes(Seconds(), Seconds())] * layout.pipeline
    owners = stage_ranks(layout)
    ranks[owners[0]] = ranks[owners[0]].plus(ends[0])
    ranks[owners[-1]] = ranks[owners[-1]].plus(ends[1])
    start = 0
    for stage, count in enumerate(layers):
        early = max(0, min(count, dense_layers - start))
        rank = owners[stage]
        if early:
            ranks[rank] = ranks[rank].plus(dense, early)
        if count > early:
            ranks[rank] = ranks[rank].plus(sparse, count - early)
        start += count
    return ranks


@lru_cache(maxsize=4096)
def block_parameters(model: ModelShape) -> tuple[float, float]:
    """Matmul parameters of a block, outside its experts and in them."""
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    matrices = 3 if model.gated else 2
    if model.experts is None:
        return float(model.dim * (heads + matrices * model.hidden_dim)), 0.0
    experts = model.experts
    shared = matrices * experts.shared_hidden_dim + experts.count
    in_experts = matrices * experts.count * experts.hidden_dim * model.dim
    return float(model.dim * (heads + shared)), float(in_experts)


def model_parameters(model: ModelShape) -> float:
    """All parameters of a model, without norms and biases."""
    outside, inside = block_parameters(model)
    dense_layers = model.experts.dense_layers if model.experts else 0
    heads = (2 * model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    dense = model.dim * (heads + (3 if model.gated else 2) * model.hidden_dim)
    vocabulary = model.vocab_size * (1 if model.tied_embeddings else 2) + model.positions
    blocks = (model.n_layers - dense_layers) * (outside + inside) + dense_layers * dense
    return blocks + vocabulary * model.dim


def _with_gathers(workload: Workload, case: BlockCase, dense: bool) -> Passes:
    """A block, with the communication of FSDP that its computation does not hide."""
    layout, numerics = workload.layout, workload.numerics
    passes = block_passes(case, dense)
    size, stride = layout.shard * layout.context, layout.tensor
    if layout.sharded != "parameters" or size == 1:
        return passes
    outside, inside = block_parameters(workload.model)
    parameters = outside / layout.tensor + inside / layout.tensor / layout.expert
    gathered_bytes = 1.0 if numerics.float8_gather else numerics.gathered_bytes
    gather = case.collectives.all_gather(parameters * gathered_bytes, size, stride)
    reduce = case.collectives.all_gather(parameters * numerics.reduce_bytes, size, stride)
    if not layout.reduce_every_microbatch:
        reduce /= layout.n_microbatches
    forward = max(0.0, gather - passes.forward.compute)
    again = gather if layout.reshard_after_forward else 0.0
    backward = max(0.0, again + reduce - passes.backward.compute)
    return Passes(
        passes.forward.plus(Seconds(shard=forward)), passes.backward.plus(Seconds(shard=backward))
    )


def _rank_parameters(workload: Workload) -> float:
    """Parameters of one tensor and pipeline rank, before sharding."""
    layout, model = workload.layout, workload.model
    _, inside = block_parameters(model)
    experts = model.n_layers * inside
    others = model_parameters(model) - experts
    return (others + experts / layout.expert) / layout.tensor / layout.pipeline


def _gradient_seconds(workload: Workload, case: BlockCase, busiest: Passes) -> tuple[float, float]:
    """Exposed communication of gradients, and of parameters after the step: once per step.

    Overlapped, it runs during the last micro-batch's backward and the first one's forward, except
    for the first block's.
    """
    layout, numerics = workload.layout, workload.numerics
    parameters = _rank_parameters(workload)
    inner = layout.shard * layout.context
    stride = layout.tensor
    gather = case.collectives.all_gather
    first = 1 / max(1, workload.model.n_layers // layout.pipeline)
    overlap = workload.overlap.data

    def exposed(communication: float, hidden_by: float) -> float:
        if not overlap:
            return communication
        return max(first * communication, communication - hidden_by)

    shard = replicate = 0.0
    if layout.sharded == "nothing":
        size = layout.replicate * inner
        twice = 2 * gather(parameters * numerics.reduce_bytes, size, stride)
        replicate = exposed(twice, busiest.backward.compute)
    elif layout.sharded in ("optimizer", "gradients"):
        size = layout.replicate * inner
        reduce = gather(parameters * numerics.reduce_bytes, size, stride)
        again = gather(parameters * numerics.gathered_bytes, size, stride)
        shard = exposed(reduce, busiest.backward.compute)
        shard += exposed(again, busiest.forward.compute)
    else:  # the first gather and the last reduction of each micro-batch, which nothing hides
        bytes_moved = parameters * (numerics.gathered_bytes + numerics.reduce_bytes)
        shard = gather(bytes_moved * first, inner, stride)
        if layout.replicate > 1:
            owned = parameters / inner * numerics.reduce_bytes
            twice = 2 * gather(owned, layout.replicate, stride * inner)
            replicate = exposed(twice, busiest.backward.compute)
    return shard, replicate


def _transfer_seconds(workload: Workload, case: BlockCase, busiest: Passes) -> float:
    """Exposed transfers of activations and their gradients between pipeline stages."""
    layout = workload.layout
    if layout.pipeline == 1:
        return 0.0
    # tensor ranks send a part each, also without sequence parallelism: Megatron's scatter and
    # gather (arXiv 2104.04473, 4.1), DeepSpeed's partitioned activations
    sent = case.tokens * workload.model.dim * workload.numerics.activation_bytes / layout.tensor
    stride = layout.tensor * layout.context * layout.shard * layout.replicate
    each = case.collectives.send(sent, stride)
    times = 2 * layout.stages_per_rank * layout.n_microbatches
    exchange = _tied_exchange_seconds(workload, case, stride)
    if workload.overlap.pipeline:
        hidden_by = busiest.total / (2 * layout.stages_per_rank)
        return exchange + 2 * layout.pipeline * each + times * max(0.0, each - hidden_by)
    return exchange + (times + 2 * layout.pipeline) * each


def _tied_exchange_seconds(workload: Workload, case: BlockCase, stride: int) -> float:
    """The tied embedding to the last stage, and the gradient of its copy back, once a step."""
    layout, model, numerics = workload.layout, workload.model, workload.numerics
    owners = stage_ranks(layout)
    distance = owners[-1] - owners[0]
    if not model.tied_embeddings or layout.sharded != "parameters" or not distance:
        return 0.0
    owned = model.vocab_size * model.dim / layout.tensor / layout.shard / layout.context
    return sum(
        case.collectives.send(owned * size, stride * distance)
        for size in (numerics.parameter_bytes, numerics.gradient_bytes)
    )


def _optimizer_seconds(workload: Workload, kernels: KernelTimes) -> float:
    """Memory traffic of the optimizer and of the gradient norm.

    Parameters and states are read and written, gradients read twice, the working copy written.
    """
    layout, numerics = workload.layout, workload.numerics
    owned = _rank_parameters(workload)
    if layout.sharded != "nothing":
        replicas = layout.replicate if layout.sharded != "parameters" else 1
        owned /= layout.shard * layout.context * replicas
    per_parameter = 2 * numerics.parameter_bytes + 2 * numerics.gradient_bytes
    per_parameter += 2 * numerics.state_bytes
    if numerics.gathered_bytes != numerics.parameter_bytes:
        per_parameter += numerics.gathered_bytes
    if workload.offload_optimizer or workload.offload_parameters:
        return owned * per_parameter / (HOST_OPTIMIZER_GB_PER_S * 1e9)
    return kernels.memory_bound(owned * per_parameter)


def _offload_seconds(workload: Workload, cluster: Cluster, busiest: Passes) -> float:
    """Exposed copies to and from the host: activations of each block, gradients and parameters."""
    layout, numerics, model = workload.layout, workload.numerics, workload.model
    to_host = cluster.machine.host_gb_per_s * 1e9
    seconds = 0.0
    if workload.offload_activations:
        activations, blocks = BlockActivations(workload), model.n_layers // layout.pipeline
        stored = sum(activations.saved(block) for block in range(max(1, blocks)))
        each_way = stored / to_host
        exposed = max(0.0, each_way - busiest.forward.compute)
        exposed += max(0.0, each_way - busiest.backward.compute)
        seconds += layout.n_microbatches * exposed
    if workload.offload_optimizer:
        owned = _rank_parameters(workload) / (layout.shard * layout.context)
        seconds += owned * (numerics.gradient_bytes + numerics.gathered_bytes) / to_host
    if workload.offload_parameters:  # this rank's shards come for each gather, gradients go back
        owned = _rank_parameters(workload) / (layout.shard * layout.context)
        per_pass = 2 * numerics.parameter_bytes + numerics.gradient_bytes
        seconds += layout.n_microbatches * owned * per_pass / to_host
    return seconds


def _checkpoint_seconds(workload: Workload, cluster: Cluster) -> float:
    """Seconds of a step for the copy of parameters and states to the host at each checkpoint."""
    if not workload.checkpoint_interval:
        return 0.0
    layout, numerics = workload.layout, workload.numerics
    owned = _rank_parameters(workload) / (layout.shard * layout.context)
    copied = owned * (numerics.parameter_bytes + numerics.state_bytes)
    return copied / (cluster.machine.host_gb_per_s * 1e9) / workload.checkpoint_interval
