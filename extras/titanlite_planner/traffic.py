"""Bytes of every collective of a step on each pipeline rank, by dimension of the mesh.

The bytes of a call are those of the largest tensor that a rank has of it: what an all-gather
returns, what a reduce-scatter takes, what an all-reduce replaces. Scalars (the loss, the norm of
the gradient) are not counted. What a ring sends follows: (n - 1) / n of it for an all-gather or a
reduce-scatter over n ranks, twice that for an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from titanlite_planner.dry_run.step_recorder import SCALAR_BYTES
from titanlite_planner.memory.model_parts import (
    GroupBytes,
    ModelParts,
    ParameterShape,
    group_bytes,
    parts_of_shape,
)
from titanlite_planner.stages import StageParts, stage_ranks, stages_of
from titanlite_planner.workload import Layout, Workload

FP32, FP64, INT64 = 4, 8, 8
ROUTER_SUMS = 3  # that a router sums besides the tokens of its experts


class _FSDPGroup(NamedTuple):
    """Parameters that are gathered together."""

    size: GroupBytes
    reshard: bool  # freed between forward and backward
    dimension: str
    ranks: int


@dataclass(frozen=True)
class CollectiveBytes:
    """All calls of one type on one dimension in a step."""

    dimension: str  # such as "tensor", or "shard x context"
    name: str
    calls: int
    bytes: int


def traffic(
    workload: Workload, parts: ModelParts | None = None, stages: tuple[StageParts, ...] = ()
) -> tuple[tuple[CollectiveBytes, ...], ...]:
    """The collectives of every pipeline rank; of titanlite, with FSDP2 and sequence parallelism.

    Context parallelism is assumed to all-gather keys and values.
    """
    parts = parts or parts_of_shape(workload.model)
    stages = stages or stages_of(workload)
    owners = stage_ranks(workload.layout)
    return tuple(
        _RankTraffic(
            workload, parts, [stages[s] for s, owner in enumerate(owners) if owner == rank]
        ).collectives()
        for rank in range(workload.layout.pipeline)
    )


def sharded_dimension(layout: Layout) -> str:
    """The dimensions that parameters are sharded over."""
    names = [name for name in ("shard", "context") if getattr(layout, name) > 1]
    return " x ".join(names)


class _RankTraffic:
    """The collectives of one rank, summed by dimension and type."""

    def __init__(self, workload: Workload, parts: ModelParts, stages: list[StageParts]):
        self.workload, self.layout = workload, workload.layout
        self.parts, self.stages = parts, stages
        self.totals: dict[tuple[str, str], tuple[int, int]] = {}

    def collectives(self) -> tuple[CollectiveBytes, ...]:
        """All collectives, without those in groups of one rank."""
        self._fsdp()
        if self.layout.tensor > 1:
            self._tensor()
        if self.layout.context > 1:
            self._context()
        if self.workload.model.experts:
            self._routers()
            if self.layout.expert > 1:
                self._experts()
        if self.layout.pipeline > 1:
            self._pipeline()
        return tuple(
            CollectiveBytes(dimension, name, calls, size)
            for (dimension, name), (calls, size) in self.totals.items()
            if calls
        )

    def _add(self, dimension: str, name: str, calls: int, size: float) -> None:
        """Add `calls` calls of `size` bytes each."""
        before, total = self.totals.get((dimension, name), (0, 0))
        self.totals[dimension, name] = (before + calls, total + round(calls * size))

    def _groups(self) -> list[_FSDPGroup]:
        """The FSDP groups of this rank; experts on ranks of their own are groups of their own."""
        layout, parts = self.layout, self.parts

        def group(parameters: tuple[ParameterShape, ...], reshard: bool) -> list[_FSDPGroup]:
            inner = tuple(p for p in parameters if p.expert and layout.expert > 1)
            outer = tuple(p for p in parameters if p not in inner)
            dimension, ranks = sharded_dimension(layout), layout.shard * layout.context
            groups = [_FSDPGroup(group_bytes(outer, layout, 0.0), reshard, dimension, ranks)]
            if inner:
                size = group_bytes(inner, layout, 0.0)
                groups.append(_FSDPGroup(size, reshard, "expert_shard", layout.expert_shard))
            return groups

        reshard = layout.reshard_after_forward
        always = reshard and layout.reshard_last_group
        with_experts = self._with_experts(self._block_numbers())
        dense = len(self._block_numbers()) - len(with_experts)
        groups = group(parts.block, reshard) * len(with_experts)
        groups += group(parts.dense_block or parts.block, reshard) * dense
        embedding = any(stage.embedding for stage in self.stages)
        last = parts.norm * sum(stage.norm for stage in self.stages)
        last += parts.output * sum(stage.output for stage in self.stages)
        if parts.tied and layout.pipeline == 1:
            return [*groups, *group((*parts.embedding, *last), always)]
        if parts.tied and any(stage.output for stage in self.stages):
            last += parts.tied  # a copy
        if embedding:
            groups += group(parts.embedding, reshard)
        return [*groups, *group(last, always)] if last else groups

    def _fsdp(self) -> None:
        layout, numerics = self.layout, self.workload.numerics
        passes = layout.runs if layout.pipeline > 1 else layout.n_microbatches
        reductions = passes if layout.reduce_every_microbatch else 1
        for group in self._groups():
            whole = group.size.sharded * group.ranks
            if group.ranks > 1:
                # with pipeline stages, parameters stay gathered from the first backward on
                forwards = layout.n_microbatches if group.reshard else passes
                gathers = forwards + (passes if group.reshard else 0)
                self._add(group.dimension, "all-gather", gathers, whole * numerics.gathered_bytes)
                reduced = whole * numerics.reduce_bytes
                self._add(group.dimension, "reduce-scatter", reductions, reduced)
            if layout.replicate > 1:
                size = group.size.sharded * numerics.reduce_bytes
                self._add("replicate", "all-reduce", reductions, size)

    def _block_numbers(self) -> list[int]:
        return [stage.first_block + n for stage in self.stages for n in range(stage.blocks)]

    def _with_experts(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if self.workload.model.has_experts(block)]

    def _routers(self) -> None:
        """Once a step, the load of the experts of all blocks, in float64."""
        layout, model = self.layout, self.workload.model
        assert model.experts is not None
        blocks = len(self._with_experts(self._block_numbers()))
        size = blocks * (model.experts.count + ROUTER_SUMS) * FP64
        dimensions = [sharded_dimension(layout), "replicate" if layout.replicate > 1 else ""]
        if layout.expert_tensor_ranks < layout.tensor:  # each routes its own tokens
            dimensions.append("tensor")
        for dimension in dimensions:
            if dimension and blocks and size >= SCALAR_BYTES:
                self._add(dimension, "all-reduce", 1, size)

    def _experts(self) -> None:
        """The tokens of each rank to their experts and back, and how many they are."""
        layout, model = self.layout, self.workload.model
        assert model.experts is not None
        tokens = layout.micro_batch * self.workload.seq_len // layout.context
        # Tensor ranks that have shards of the same experts all send the same tokens.
        rows = tokens * layout.expert_tensor_ranks // layout.tensor * model.experts.active
        numbers = self._with_experts(self._block_numbers())
        again = [number for number in numbers if self._is_recomputed(number)]
        forwards, count = len(numbers) + len(again), layout.n_microbatches
        size = rows * model.dim * self.workload.numerics.activation_bytes
        self._add("expert", "all-to-all", count * 2 * (forwards + len(numbers)), size)
        if (counts := model.experts.count * INT64) >= SCALAR_BYTES:
            self._add("expert", "all-to-all", count * len(numbers), counts)  # kept for recomputing

    def _is_recomputed(self, block: int) -> bool:
        """Whether the tokens of a block are sent again in backward."""
        recompute = self.workload.recompute
        every_kth = recompute == "selective" and block % self.workload.recompute_every == 0
        return every_kth or recompute in ("full", "per_operation")

    def _recomputed(self) -> tuple[int, int]:
        """(blocks of this rank, those that are recomputed as a whole)."""
        workload, whole = self.workload, 0
        for stage in self.stages:
            numbers = range(stage.first_block, stage.first_block + stage.blocks)
            if workload.recompute == "full":
                whole += stage.blocks
            elif workload.recompute == "selective":
                whole += sum(number % workload.recompute_every == 0 for number in numbers)
        return sum(stage.blocks for stage in self.stages), whole

    def _tensor(self) -> None:
        """Two gathers and two reductions of the residual stream in each pass of a block."""
        workload, layout, model = self.workload, self.layout, self.workload.model
        tokens = layout.micro_batch * workload.seq_len // layout.context
        hidden = tokens * model.dim * workload.numerics.activation_bytes
        blocks, again = self._recomputed()
        operations = blocks if workload.recompute == "per_operation" else 0
        ends = sum(stage.embedding + stage.output for stage in self.stages)
        count = layout.n_microbatches
        gathers = 4 * blocks + 2 * again + 2 * operations + ends
        scatters = 4 * blocks + 2 * again + ends
        if model.experts:
            numbers = self._with_experts(self._block_numbers())
            router = model.experts.count * model.dim * FP32
            self._add("tensor", "all-reduce", count * len(numbers), router)
            if layout.expert_tensor_ranks < layout.tensor and not model.experts.shared_hidden_dim:
                # only attention gathers tokens
                recomputed = sum(map(self._is_recomputed, numbers))
                gathers -= 2 * len(numbers) + recomputed
                scatters -= 2 * len(numbers) + (0 if operations else recomputed)
        if model.n_kv_heads % layout.tensor:  # gradients of keys and values, one head a rank
            heads = tokens * layout.tensor * model.head_dim * workload.numerics.activation_bytes
            self._add("tensor", "all-gather", count * 2 * blocks, heads)
        self._add("tensor", "all-gather", count * gathers, hidden)
        self._add("tensor", "reduce-scatter", count * scatters, hidden)
        norms = model.norms_per_block * blocks + sum(stage.norm for stage in self.stages)
        vectors = norms * (2 if model.biases is True else 1)
        self._add("tensor", "all-reduce", count * vectors, model.dim * FP32)
        if model.positions and any(stage.embedding for stage in self.stages):
            self._add("tensor", "all-reduce", count, model.positions * model.dim * FP32)
        if model.qk_norm == "projections":  # mean squares of queries and of keys, and gradients
            self._add("tensor", "all-reduce", count * 2 * (2 * blocks + again), tokens * FP32)
        elif model.qk_norm:
            self._add("tensor", "all-reduce", count * 2 * blocks, model.head_dim * FP32)
        if latent := model.latent:  # gradient of the matrix that the latent vectors come from
            matrix = (latent.key_value_rank + latent.rotary_dim) * model.dim
            self._add(
                "tensor", "all-reduce", count * blocks, matrix * workload.numerics.activation_bytes
            )
        if any(stage.output for stage in self.stages):  # largest logit; two sums
            chunk = min(tokens, workload.loss_chunk_tokens or tokens)
            full, rest = divmod(tokens, chunk)
            for calls, rows in ((count * full, chunk), (count * bool(rest), rest)):
                self._add("tensor", "all-reduce", calls, rows * FP32)
                self._add("tensor", "all-reduce", calls, 2 * rows * FP32)

    def _context(self) -> None:
        """Keys and values in each pass, and their gradients in fp32."""
        workload, layout, model = self.workload, self.layout, self.workload.model
        heads = max(1, model.n_kv_heads // layout.tensor)
        elements = 2 * layout.micro_batch * heads * workload.seq_len * model.head_dim
        blocks, again = self._recomputed()
        count, size = layout.n_microbatches, workload.numerics.activation_bytes
        self._add("context", "all-gather", count * (2 * blocks + again), elements * size)
        sent = count * blocks * (layout.context - 1)  # the gradient of each other rank's shard
        self._add("context", "all-to-all", sent, elements * FP32 // layout.context)

    def _pipeline(self) -> None:
        """Activations to the next stage, and their gradients back."""
        workload, layout = self.workload, self.layout
        tokens = layout.micro_batch * workload.seq_len // layout.context // layout.tensor
        size = tokens * workload.model.dim * workload.numerics.activation_bytes
        owners, n_stages = stage_ranks(layout), len(stage_ranks(layout))
        calls = 0
        for stage, owner in enumerate(owners):
            if owner == owners[self.stages[0].number]:
                others = [s for s in (stage - 1, stage + 1) if 0 <= s < n_stages]
                calls += sum(owners[other] != owner for other in others)
        for name in ("send", "receive"):
            self._add("pipeline", name, calls * layout.n_microbatches, size)
        if self.parts.tied and owners[0] != owners[-1]:
            self._tied_embedding(owners[self.stages[0].number], owners[0], owners[-1])

    def _tied_embedding(self, rank: int, first: int, last: int) -> None:
        """The embedding to the last stage, and the gradient of its copy back, once a step."""
        numerics = self.workload.numerics
        elements = group_bytes(self.parts.tied, self.layout, 0.0).stored
        weights, gradients = numerics.parameter_bytes, numerics.gradient_bytes
        if rank in (first, last):
            sent, received = (weights, gradients) if rank == first else (gradients, weights)
            self._add("pipeline", "send", 1, elements * sent)
            self._add("pipeline", "receive", 1, elements * received)
