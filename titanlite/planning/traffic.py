"""Bytes of every collective of a step on each pipeline rank, by dimension of the mesh.

The bytes of a call are those of the largest tensor that a rank has of it: what an all-gather
returns, what a reduce-scatter takes, what an all-reduce replaces. Scalars (the loss, the norm of
the gradient) are not counted. What a ring sends follows: (n - 1) / n of it for an all-gather or a
reduce-scatter over n ranks, twice that for an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.planning.model_parts import GroupBytes, ModelParts, group_bytes, parts_of_shape
from titanlite.planning.stages import StageParts, stage_ranks, stages_of
from titanlite.planning.workload import Layout, Workload

FP32 = 4


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
        self.workload, self.layout, self.parts, self.stages = (
            workload,
            workload.layout,
            parts,
            stages,
        )
        self.totals: dict[tuple[str, str], tuple[int, int]] = {}

    def collectives(self) -> tuple[CollectiveBytes, ...]:
        """All collectives, without those in groups of one rank."""
        self._fsdp()
        if self.layout.tensor > 1:
            self._tensor()
        if self.layout.context > 1:
            self._context()
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

    def _groups(self) -> list[tuple[GroupBytes, bool]]:
        """(elements, whether it is freed between forward and backward) of each FSDP group."""
        layout, parts = self.layout, self.parts

        def group(parameters) -> GroupBytes:
            return group_bytes(parameters, layout, 0.0)

        reshard = layout.reshard_after_forward
        always = reshard and layout.reshard_last_group
        blocks = sum(stage.blocks for stage in self.stages)
        groups = [(group(parts.block), reshard)] * blocks
        embedding, last = group(parts.embedding), group(())
        for stage in self.stages:
            last = last + (group(parts.norm) if stage.norm else group(()))
            last = last + (group(parts.output) if stage.output else group(()))
        if parts.tied:
            return [*groups, (embedding + last, always)]
        if any(stage.embedding for stage in self.stages):
            groups.append((embedding, reshard))
        return [*groups, (last, always)] if last.gathered else groups

    def _fsdp(self) -> None:
        layout, numerics = self.layout, self.workload.numerics
        ranks, dimension = layout.shard * layout.context, sharded_dimension(layout)
        passes = layout.runs if layout.pipeline > 1 else layout.n_microbatches
        reductions = passes if layout.reduce_every_microbatch else 1
        for group, reshard in self._groups():
            whole = group.sharded * ranks
            if ranks > 1:
                # with pipeline stages, parameters stay gathered from the first backward on
                forwards = layout.n_microbatches if reshard else passes
                gathers = forwards + (passes if reshard else 0)
                self._add(dimension, "all-gather", gathers, whole * numerics.gathered_bytes)
                self._add(dimension, "reduce-scatter", reductions, whole * numerics.reduce_bytes)
            if layout.replicate > 1:
                size = group.sharded * numerics.reduce_bytes
                self._add("replicate", "all-reduce", reductions, size)

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
        if model.n_kv_heads % layout.tensor:  # gradients of keys and values, one head a rank
            heads = tokens * layout.tensor * model.head_dim * workload.numerics.activation_bytes
            self._add("tensor", "all-gather", count * 2 * blocks, heads)
        self._add("tensor", "all-gather", count * gathers, hidden)
        self._add("tensor", "reduce-scatter", count * (4 * blocks + 2 * again + ends), hidden)
        norms = 2 * blocks + sum(stage.norm for stage in self.stages)
        self._add("tensor", "all-reduce", count * norms, model.dim * FP32)
        if model.qk_norm:
            self._add("tensor", "all-reduce", count * 2 * blocks, model.head_dim * FP32)
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
        self._add("context", "reduce-scatter", count * blocks, elements * FP32)

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
