"""Estimate the seconds of one training step, and what they are spent on.

Every kernel takes what its FLOPs and bytes take at the GPU's efficiency, every collective what its
bytes take over the links that its group crosses. What runs at the same time is counted once: the
parameters of the next block are gathered while this block computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from titanlite_planner.hardware import Cluster
from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.model_shape import (
    ModelShape,
    block_matmul_weights,
    count_parameters,
    feed_forward_weights,
)
from titanlite_planner.stages import stage_ranks
from titanlite_planner.time.block import (
    BlockKind,
    block_kinds,
    block_passes,
    embedding_passes,
    output_passes,
)
from titanlite_planner.time.block_case import BlockCase, Passes, Seconds, block_case
from titanlite_planner.time.collectives import CollectiveTimes
from titanlite_planner.time.efficiency import Efficiency, find_efficiency
from titanlite_planner.time.kernels import KernelTimes
from titanlite_planner.time.pipeline import divide_layers, idle_seconds
from titanlite_planner.workload import Layout, Workload

HOST_OPTIMIZER_GB_PER_S = 100.0
# of host memory, for the optimizer of one GPU that computes there: an assumption, not measured


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
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())  # in the order of the fields

    @property
    def communication(self) -> float:
        """Exposed communication of all dimensions."""
        return (
            self.tensor + self.context + self.expert + self.pipeline + self.shard + self.replicate
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name, without those that are 0."""
        return {name: value for name, value in vars(self).items() if value}


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
    layout = workload.layout
    different, of_rank = _rank_passes(workload, case)
    cost_of = [passes.total for passes in different]
    costs = [cost_of[number] for number in of_rank]
    busiest = different[cost_of.index(max(cost_of))]
    both = busiest.forward.plus(busiest.backward)
    of_run = layout.n_microbatches // layout.runs
    bubble = layout.runs * idle_seconds(
        layout.schedule,
        layout.pipeline,
        layout.stages_per_rank,
        of_run,
        costs,
        workload.splits_backward,
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
        host=both.host * many,
    )


def _rank_passes(workload: Workload, case: BlockCase) -> tuple[list[Passes], tuple[int, ...]]:
    """One micro-batch on the pipeline ranks: different ones, and the number of each rank's."""
    layout, model = workload.layout, workload.model
    kinds = block_kinds(model)
    passes_of: dict[_Module, Passes] = {
        kind: _with_gathers(workload, case, kind) for kind in set(kinds)
    }
    embedding, output = embedding_passes(case), output_passes(case)
    layers = layout.stage_blocks
    if not layers:
        stages = layout.pipeline * layout.stages_per_rank
        block = sum(passes_of[kind].total for kind in kinds) / len(kinds)
        ends = round(embedding.total / block, 2), round(output.total / block, 2)
        layers = divide_layers(model.n_layers, stages, *ends)
    passes_of |= {"embedding": embedding, "output": output}
    different, of_rank = _rank_modules(layers, stage_ranks(layout), kinds)
    return [_sum(modules, passes_of) for modules in different], of_rank


_Module = BlockKind | Literal["embedding", "output"]
_Modules = tuple[tuple[_Module, int], ...]  # kinds of modules, and how many of each


@lru_cache(maxsize=4096)  # a search asks for thousands, most of them again
def _rank_modules(
    layers: tuple[int, ...], owners: tuple[int, ...], kinds: tuple[BlockKind, ...]
) -> tuple[list[_Modules], tuple[int, ...]]:
    """What pipeline ranks have, without repetitions, and the number of each rank's."""
    modules: list[list[tuple[_Module, int]]] = [[] for _ in range(max(owners) + 1)]
    modules[owners[0]].append(("embedding", 1))
    modules[owners[-1]].append(("output", 1))
    start = 0
    for rank, count in zip(owners, layers, strict=True):
        modules[rank] += Counter(kinds[start : start + count]).items()
        start += count
    number_of: dict[_Modules, int] = {}
    of_rank = tuple(number_of.setdefault(tuple(own), len(number_of)) for own in modules)
    return list(number_of), of_rank


def _sum(modules: _Modules, passes_of: Mapping[_Module, Passes]) -> Passes:
    total = Passes(Seconds(), Seconds())
    for module, count in modules:
        total = total.plus(passes_of[module], count)
    return total


@lru_cache(maxsize=4096)
def block_parameters(model: ModelShape, experts: bool) -> tuple[float, float]:
    """Matmul parameters of a block with or without experts: outside its experts, and in them."""
    block = model.n_layers - 1 if experts else 0
    weights = float(block_matmul_weights(model, block))
    if not experts or model.experts is None:
        return weights, 0.0
    inside = float(feed_forward_weights(model, model.experts.count * model.experts.hidden_dim))
    return weights - inside, inside


@lru_cache(maxsize=4096)
def expert_parameters(model: ModelShape) -> float:
    """Parameters of all experts that tokens are routed to."""
    return sum(block_parameters(model, True)[1] for kind in block_kinds(model) if kind.experts)


@lru_cache(maxsize=4096)
def model_parameters(model: ModelShape) -> float:
    """All parameters of a model."""
    return float(count_parameters(model))


def _passes_of_run(layout: Layout) -> tuple[int, int]:
    """(gathers of parameters for backward, reductions of gradients) in one step.

    Without pipeline stages, each micro-batch has them. With stages, a run of the schedule has: the
    parameters stay gathered from the first backward to the last, and the last one reduces.
    """
    runs = layout.runs if layout.pipeline > 1 else layout.n_microbatches
    return runs, runs if layout.reduce_every_microbatch else 1


def _with_gathers(workload: Workload, case: BlockCase, kind: BlockKind) -> Passes:
    """A block, with the communication of FSDP that its computation does not hide.

    It is the mean of the micro-batches, of which some gather, and some reduce.
    """
    layout, numerics = workload.layout, workload.numerics
    passes = block_passes(case, kind)
    size = layout.shard * layout.context
    if layout.sharded != "parameters" or size == 1:
        return passes
    outside, inside = block_parameters(workload.model, kind.experts)
    gathered_bytes = 1.0 if numerics.float8_gather else numerics.gathered_bytes
    held = _held(workload, outside, inside)
    gather = _gather_seconds(workload, case, held, gathered_bytes, size)
    reduce = _gather_seconds(workload, case, held, numerics.reduce_bytes, size)
    many = layout.n_microbatches
    gathers, reductions = _passes_of_run(layout)
    exposed = case.collectives.exposed
    forward = exposed(gather, passes.forward.compute)
    if layout.reshard_after_forward:
        with_gather, both = gathers / many, min(gathers, reductions) / many
    else:
        forward *= gathers / many
        with_gather, both = 0.0, 0.0
    hidden = passes.backward.compute
    backward = both * exposed(gather + reduce, hidden)
    backward += (with_gather - both) * exposed(gather, hidden)
    backward += (reductions / many - both) * exposed(reduce, hidden)
    return Passes(
        passes.forward.plus(Seconds(shard=forward)), passes.backward.plus(Seconds(shard=backward))
    )


def _held(workload: Workload, outside: float, inside: float) -> tuple[float, float]:
    """What one tensor rank has of parameters outside of experts and in them, before sharding."""
    layout = workload.layout
    return outside / layout.tensor, inside / layout.expert_tensor_ranks / layout.expert


def _gather_seconds(
    workload: Workload, case: BlockCase, held: tuple[float, float], element_bytes: float, ranks: int
) -> float:
    """Seconds to gather or to reduce parameters over `ranks` data-parallel ranks.

    Those of experts only over the ranks that have the same ones, which are further apart.
    """
    layout, gather = workload.layout, case.collectives.all_gather
    seconds = gather(held[0] * element_bytes, ranks, layout.tensor)
    if not held[1]:
        return seconds
    stride = layout.expert_tensor_ranks * layout.expert
    return seconds + gather(held[1] * element_bytes, layout.expert_shard, stride)


def _stage_parameters(workload: Workload) -> tuple[float, float]:
    """Parameters of one tensor and pipeline rank: outside of experts, and in them."""
    experts = expert_parameters(workload.model)
    others = model_parameters(workload.model) - experts
    held = _held(workload, others, experts)
    return held[0] / workload.layout.pipeline, held[1] / workload.layout.pipeline


def _rank_parameters(workload: Workload) -> float:
    """Parameters of one tensor and pipeline rank, before sharding."""
    return sum(_stage_parameters(workload))


def _gradient_seconds(workload: Workload, case: BlockCase, busiest: Passes) -> tuple[float, float]:
    """Exposed communication of gradients, and of parameters after the step.

    Overlapped, it runs during the last micro-batch's backward and the first one's forward, except
    for the first block's. With sharded parameters, every run has its own (`_passes_of_run`), and
    replicas reduce the gradients whenever their shards do.
    """
    layout, numerics = workload.layout, workload.numerics
    held = _stage_parameters(workload)
    inner = layout.shard * layout.context
    first = 1 / max(1, workload.model.n_layers // layout.pipeline)

    def exposed(communication: float, hidden_by: float) -> float:
        if not workload.overlap.data:
            return communication
        return max(first * communication, case.collectives.exposed(communication, hidden_by))

    def moved(element_bytes: float, ranks: int) -> float:
        return _gather_seconds(workload, case, held, element_bytes, ranks)

    shard = replicate = 0.0
    if layout.sharded == "nothing":
        replicate = exposed(
            2 * moved(numerics.reduce_bytes, layout.replicate * inner), busiest.backward.compute
        )
    elif layout.sharded in ("optimizer", "gradients"):
        reduce = moved(numerics.reduce_bytes, layout.replicate * inner)
        again = moved(numerics.gathered_bytes, layout.replicate * inner)
        shard = exposed(reduce, busiest.backward.compute)
        shard += exposed(again, busiest.forward.compute)
    else:  # the first gather and the last reduction of each micro-batch, which nothing hides
        gathers, reductions = _passes_of_run(layout)
        shard = gathers * moved(first * numerics.gathered_bytes, inner)
        shard += reductions * moved(first * numerics.reduce_bytes, inner)
        if layout.replicate > 1:
            owned = sum(held) / inner * numerics.reduce_bytes
            stride = layout.tensor * inner
            twice = 2 * case.collectives.all_gather(owned, layout.replicate, stride)
            replicate = reductions * exposed(twice, busiest.backward.compute)
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
        exposed = case.collectives.exposed(each, hidden_by)
        return exchange + 2 * layout.pipeline * each + times * exposed
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

    Parameters and states are read and written, gradients read twice, the working copy written, on
    one rank by FSDP.
    """
    layout, numerics = workload.layout, workload.numerics
    owned = _rank_parameters(workload)
    if layout.sharded != "nothing":
        replicas = layout.replicate if layout.sharded != "parameters" else 1
        owned /= layout.shard * layout.context * replicas
    per_parameter = 2 * numerics.parameter_bytes + 2 * numerics.gradient_bytes
    per_parameter += 2 * numerics.state_bytes
    if numerics.gathered_bytes != numerics.parameter_bytes:
        alone = layout.shard * layout.context == 1 and layout.sharded == "parameters"
        copied = alone and workload.counted_kernels
        per_parameter += _copies_of_fsdp(workload) if copied else numerics.gathered_bytes
    if workload.offload_parameters:  # the optimizer runs on the CPU
        return owned * per_parameter / (HOST_OPTIMIZER_GB_PER_S * 1e9)
    return kernels.memory_bound(owned * per_parameter)


def _copies_of_fsdp(workload: Workload) -> float:
    """Bytes per parameter that FSDP2 moves in a step where nothing is sent.

    Parameters are cast and copied once; gradients are cast, and copied, for each reduction
    (benchmarks/gpu_bytes.md). On several ranks, the fitted efficiencies include such copies.
    """
    numerics = workload.numerics
    gathered, reduced = numerics.gathered_bytes, numerics.reduce_bytes
    _, reductions = _passes_of_run(workload.layout)
    return numerics.parameter_bytes + 3 * gathered + reductions * (gathered + 3 * reduced)


def _offload_seconds(workload: Workload, cluster: Cluster, busiest: Passes) -> float:
    """Exposed copies to and from the host: activations, optimizer state, or parameters."""
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
    owned = _rank_parameters(workload) / (layout.shard * layout.context)
    if workload.offload_optimizer and not workload.offload_parameters:
        # to the GPU, which updates the parameters, and back, on one stream
        seconds += owned * 2 * numerics.state_bytes / to_host
    if workload.offload_parameters:  # this rank's shards come for each gather, gradients go back
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
