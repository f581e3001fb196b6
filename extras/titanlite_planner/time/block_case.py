"""What the time of a block depends on, and the seconds that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.model_shape import ModelShape
from titanlite_planner.time.collectives import CollectiveTimes
from titanlite_planner.time.kernels import KernelTimes
from titanlite_planner.workload import (
    ExpertExchange,
    Layout,
    MatmulPrecision,
    Numerics,
    Recompute,
    Workload,
)


class Seconds(NamedTuple):
    """Seconds by what they are spent on."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0  # memory-bound operations
    tensor: float = 0.0  # exposed communication
    context: float = 0.0
    expert: float = 0.0
    shard: float = 0.0
    host: float = 0.0  # waiting for the host, which launches kernels too slowly

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def compute(self) -> float:
        """Seconds in which communication of other dimensions may run."""
        return self.matmul + self.attention + self.memory

    def plus(self, other: Seconds, times: float = 1.0) -> Seconds:
        """The sum with `other`, `times` times."""
        return Seconds(*[mine + times * theirs for mine, theirs in zip(self, other, strict=True)])


class Passes(NamedTuple):
    """A forward pass, and a backward pass with its recomputation."""

    forward: Seconds
    backward: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total

    def plus(self, other: Passes, times: float = 1.0) -> Passes:
        """The sum with `other`, `times` times."""
        return Passes(
            self.forward.plus(other.forward, times), self.backward.plus(other.backward, times)
        )


@dataclass(frozen=True)
class BlockCase:
    """What the time of a block depends on; equal cases are computed once."""

    model: ModelShape
    layout: tuple[int, int, int, int]  # ranks: tensor, context, expert; 1 if sequence parallel
    micro_batch: int
    accumulates: bool  # unsharded gradients of several micro-batches
    seq_len: int
    numerics: Numerics
    recompute: Recompute
    recompute_every: int
    recomputed: tuple[float, float]
    # under a memory budget: bytes that pointwise operations compute again, and the fraction of the
    # forward beyond them
    compiled: bool
    counted_kernels: bool
    output_grad_bytes: float  # to scale an element of the output weights' gradient
    fused_attention: bool
    attention_kernel: str
    overlap_tensor: bool
    blocking_launches: bool
    fused_sums: bool
    expert_tensor: int  # tensor ranks that each expert is sharded over
    exchange: ExpertExchange
    kernels: KernelTimes
    collectives: CollectiveTimes

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one context rank."""
        return self.micro_batch * self.seq_len / self.layout[1]

    @property
    def unquantized(self) -> MatmulPrecision:
        """The precision of attention and of the output layer."""
        return "float32" if self.numerics.matmuls == "float32" else "bfloat16"


def _accumulates(layout: Layout) -> bool:
    """Whether gradients of several micro-batches are added before they are reduced."""
    if layout.sharded == "parameters" and layout.reduce_every_microbatch:
        return layout.pipeline > 1 and layout.n_microbatches > layout.runs
    return layout.n_microbatches > 1


def _recomputed_within_budget(workload: Workload) -> tuple[float, float]:
    if workload.recompute != "memory_budget" or workload.stored_activations == 1:
        return 0.0, 0.0
    activations = BlockActivations(workload)
    return activations.pointwise, activations.recomputed_beyond_pointwise


def _output_grad_bytes(workload: Workload) -> float:
    """titanlite's loss computes the gradient before its scale is known, in fp32 over chunks."""
    if workload.loss != "fused":
        return 0.0
    layout, size = workload.layout, workload.numerics.activation_bytes
    tokens = layout.micro_batch * workload.seq_len / layout.context
    is_chunked = 0 < workload.loss_chunk_tokens < tokens
    return size + (4.0 if is_chunked else size)


def block_case(workload: Workload, kernels: KernelTimes, collectives: CollectiveTimes) -> BlockCase:
    """The case of a workload."""
    layout: Layout = workload.layout
    sequence_parallel = layout.sequence_parallel and layout.tensor > 1
    return BlockCase(
        workload.model,
        (layout.tensor, layout.context, layout.expert, int(sequence_parallel)),
        layout.micro_batch,
        _accumulates(layout),
        workload.seq_len,
        workload.numerics,
        workload.recompute,
        workload.recompute_every,
        _recomputed_within_budget(workload),
        workload.compiled,
        workload.counted_kernels,
        _output_grad_bytes(workload),
        workload.fused_attention,
        workload.attention_kernel,
        workload.overlap.tensor,
        workload.blocking_launches,
        workload.fused_sums,
        layout.expert_tensor_ranks,
        workload.exchange,
        kernels,
        collectives,
    )
