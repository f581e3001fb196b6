"""What one training step computes, and how it is divided over GPUs, as plain numbers.

Memory and time are estimated from a `Workload`. It is made from a job of titanlite, or from a row
of published measurements, whose model and framework titanlite need not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from titanlite.parallelize.schedule import PipelineAction
from titanlite_planner.model_shape import ModelShape

Recompute = Literal["none", "selective", "per_operation", "attention", "full", "memory_budget"]
# "selective": every k-th block; "per_operation": all operations but attention and every second
# matmul; "attention": the core attention of every block (Megatron's selective recomputation);
# "memory_budget": the compiler stores at most the fraction `stored_activations`, and recomputes
# pointwise operations first
POINTWISE_BUDGET = 0.99  # with which the compiler recomputes pointwise operations only
MatmulPrecision = Literal["float32", "bfloat16", "float8", "float4"]
ScheduleActions = tuple[tuple[PipelineAction, ...], ...]  # of each pipeline rank


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and how a step's sequences are divided into micro-batches."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1  # borrowed from the data-parallel, context and tensor ranks
    expert_tensor: int = 0  # tensor ranks that each expert is sharded over; 0: all
    sequence_parallel: bool = True  # norms and residuals are divided over the tensor ranks
    sharded: Literal["nothing", "optimizer", "gradients", "parameters"] = "parameters"
    # over the `shard` ranks, as ZeRO 0 to 3
    reshard_after_forward: bool = True  # parameters are gathered again in backward
    reshard_last_group: bool = False  # so are the norm and the output layer
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    micro_batch: int = 1  # sequences
    n_microbatches: int = 1  # of a data-parallel rank in one step
    runs: int = 1  # of the pipeline schedule in one step, each with its share of the micro-batches
    reduce_every_microbatch: bool = True  # gradients are reduced in every run, not in the last only
    stage_blocks: tuple[int, ...] = ()  # of each stage, in model order; empty: as equal as possible
    stage_ranks: tuple[int, ...] = ()  # pipeline rank of each stage; empty: as the schedule says
    actions: ScheduleActions = ()  # of a schedule from a file

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.context * self.tensor * self.pipeline

    @property
    def expert_tensor_ranks(self) -> int:
        """Tensor ranks that each expert is sharded over."""
        return self.expert_tensor or self.tensor

    @property
    def expert_shard(self) -> int:
        """Ranks that the parameters of the experts are sharded over, besides that."""
        ranks = self.shard * self.context * self.tensor
        return max(1, ranks // (self.expert * self.expert_tensor_ranks))

    @property
    def global_batch(self) -> int:
        """Sequences of one step."""
        return self.replicate * self.shard * self.micro_batch * self.n_microbatches


@dataclass(frozen=True)
class Overlap:
    """Which communication runs while the GPU computes; FSDP's always does."""

    tensor: bool = False  # asynchronous tensor parallelism: matmuls in chunks
    data: bool = True  # gradients of the last micro-batch, and parameters of the first
    pipeline: bool = False  # transfers between stages


@dataclass(frozen=True)
class ExpertExchange:
    """How tokens reach the experts of other ranks, and how these are launched."""

    once_per_rank: bool = False
    # a token is sent once to a rank, and once over the network to a link domain, however many of
    # its experts are there (DeepEP, HybridEP); otherwise once for each expert
    overlapped: bool = False  # with the computation of another micro-batch
    one_graph: bool = False  # the step is one CUDA graph, so that the host launches no kernels


@dataclass(frozen=True)
class Numerics:
    """Bytes per element, and the precision of matmuls."""

    matmuls: MatmulPrecision = "bfloat16"
    parameter_bytes: float = 4
    gathered_bytes: float = 2  # parameters as FSDP gathers them, or a working copy of them
    gradient_bytes: float = 4
    state_bytes: float = 8  # of the optimizer, per parameter element
    average_bytes: float = 0  # of an average of the weights, per parameter element
    activation_bytes: float = 2
    reduce_bytes: float = 4  # gradients while they are reduced
    float8_gather: bool = False  # parameters and activations are gathered in float8
    block_scales: bool = False  # a scale for each 16 or 32 elements (MXFP8, NVFP4)
    weights_quantized_once: bool = False  # in a step; otherwise in each micro-batch
    quantize_bytes: float = 0.0
    # to quantize an element of a Float8 operand; 0: what scales of whole tensors take


@dataclass(frozen=True)
class Workload:
    """One step of one run."""

    model: ModelShape
    layout: Layout
    seq_len: int
    numerics: Numerics = field(default_factory=Numerics)
    recompute: Recompute = "none"
    recompute_every: int = 1  # under "selective": every k-th block
    stored_activations: float = 1.0  # fraction, under "memory_budget"
    loss_chunk_tokens: int = 0  # 0: the logits of a micro-batch at once
    loss: Literal["fused", "pytorch", "megatron", "flash"] = "fused"
    # titanlite's, with the output layer; F.cross_entropy of fp32 logits, which DTensor shards over
    # the tensor ranks; Megatron's vocab_parallel_cross_entropy; FlashAttention's kernel
    compiled: bool = True
    fused_attention: bool = True  # does not store the attention matrix
    attention_kernel: Literal["flash1", "flash2", "native"] = "native"
    # FlashAttention, also its Triton version; FlashAttention-2, written for Ampere; or the kernel
    # of the GPU's generation (cuDNN, FA3, FA4)
    offload_activations: bool = False
    offload_optimizer: bool = False  # its state, which the GPU that updates copies in every step
    step_in_backward: bool = False  # each parameter is updated, and its gradient freed, in backward
    offload_parameters: bool = False  # and gradients and optimizer states
    blocking_launches: bool = False  # CUDA_LAUNCH_BLOCKING=1: the host's time is not hidden
    counted_kernels: bool = False
    # of titanlite: they move what benchmarks/gpu_bytes.md counts. The efficiencies of GPUs were
    # fitted to other frameworks without it
    fused_sums: bool = False  # the matmul of a weight's gradient adds it to that of other batches
    overlap: Overlap = field(default_factory=Overlap)
    exchange: ExpertExchange = field(default_factory=ExpertExchange)
    checkpoint_interval: int = 0  # steps; the copy to the host stops training. 0: none

    @property
    def splits_backward(self) -> bool:
        """Whether a schedule's input and weight gradients are computed at different times: see
        `ModelTransforms.splits_backward`."""
        return self.recompute == "none" and not self.compiled
