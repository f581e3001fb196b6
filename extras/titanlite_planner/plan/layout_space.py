"""The layouts that a search chooses from: those that pass the checks of train.py.

A candidate is refused here by the functions that train.py refuses it with, or by an exact condition
that is cheaper: a search visits up to a million candidates, and checks the whole configuration of
the best ones only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from titanlite.distributed.mesh import Degrees, ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.models import ModelSizes, ModelSpec
from titanlite.parallelize.context import check_context_parallel
from titanlite.parallelize.expert import check_expert_parallel
from titanlite.parallelize.float8 import ALIGNMENT
from titanlite.parallelize.pipeline_plan import SPLIT_BACKWARD_SINCE
from titanlite.parallelize.schedule import SCHEDULES, assign_stages, required_microbatches
from titanlite.parallelize.stage_partition import balance_stages
from titanlite.parallelize.tensor import check_tensor_parallel
from titanlite_planner.workload import POINTWISE_BUDGET, Recompute, Workload

MAX_STAGES_PER_RANK = 8  # more are not searched: transfers grow, and the bubble hardly shrinks
MATMUL_CHOICES = ("bf16", "float8", "float8 gather")  # the last all-gathers weights in Float8 too
RECOMPUTES: dict[str, tuple[Recompute, int]] = {  # by what they are called; (kind, every k-th)
    "none": ("none", 1),
    "pointwise": ("memory_budget", 1),  # of compiled blocks
    "every 8th block": ("selective", 8),
    "every 4th block": ("selective", 4),
    "every 3rd block": ("selective", 3),
    "every 2nd block": ("selective", 2),
    "op": ("per_operation", 1),
    "full": ("full", 1),
}
# What runs of benchmarks/published_runs.csv have; tests compare these with its rows.
LEAST_TOKENS_PER_CONTEXT_RANK = 4096
PUBLISHED: dict[str, Sequence[Any]] = {
    "schedule": ("1F1B", "Interleaved1F1B"),
    "recompute": ("none", "op", "full"),
    "offload_activations": (False,),
    "offload_optimizer": (False,),
}
DEGREES = ("replicate", "shard", "context", "tensor", "pipeline", "expert", "expert_tensor")


@dataclass(frozen=True)
class StepOptions:
    """Choices that lower the memory of a layout, and cost time."""

    recompute: str = "none"  # a key of RECOMPUTES
    offload_activations: bool = False
    offload_optimizer: bool = False
    reshard: bool = False  # parameters are freed after forward, and gathered again in backward

    def costs_no_less_than(self, other: StepOptions) -> bool:
        """Whether these options include everything that takes time in `other`."""
        flags = ("offload_activations", "offload_optimizer", "reshard")
        return recomputes_no_less(self.recompute, other.recompute) and all(
            getattr(self, flag) >= getattr(other, flag) for flag in flags
        )


def recomputes_no_less(one: str, other: str) -> bool:
    """Whether `one` recomputes everything that `other` does."""
    if one == other or other == "none" or one == "full" or (one, other) == ("op", "pointwise"):
        return True
    kinds = RECOMPUTES[one], RECOMPUTES[other]
    by_block = all(kind == "selective" for kind, _ in kinds)
    return by_block and kinds[0][1] <= kinds[1][1]


@dataclass(frozen=True)
class Frame:
    """Degrees, micro-batch and precision: what remains are the schedule and the options."""

    degrees: Degrees
    micro_batch: int  # sequences
    n_microbatches: int  # of a data-parallel rank in one step
    precision: str = "bf16"  # one of MATMUL_CHOICES


@dataclass(frozen=True)
class LayoutChoice:
    """One candidate."""

    frame: Frame
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    options: StepOptions = StepOptions()


@dataclass(frozen=True)
class LayoutSpace:
    """All candidates for one model on a number of GPUs."""

    spec: ModelSpec
    sizes: ModelSizes
    gpus: int
    seq_len: int
    global_batch: int  # sequences
    has_optimizer_offload: bool = True  # the optimizer can store its state in host memory
    precisions: Sequence[str] = ("bf16",)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # what is not searched: a degree, "micro_batch", "schedule", "stages_per_rank", or a field of
    # StepOptions, with its value
    trusted: bool = False  # whether only what published runs have is searched
    compiled: bool = True

    def frames(self) -> Iterator[Frame]:
        """Legal degrees and micro-batches, with at least one schedule each."""
        for degrees in self._degrees():
            if self.global_batch % degrees.batch:
                continue
            rank_batch = self.global_batch // degrees.batch
            for micro_batch in self.values("micro_batch", divisors(rank_batch)):
                if rank_batch % micro_batch == 0:
                    for precision in self.precisions:
                        frame = Frame(degrees, micro_batch, rank_batch // micro_batch, precision)
                        if self._suits_float8(frame) and any(self.schedules(frame)):
                            yield frame

    def schedules(self, frame: Frame) -> Iterator[tuple[str, int]]:
        """(schedule, stages per rank) that can run the micro-batches of a frame."""
        ranks = frame.degrees.pipeline
        if ranks == 1:
            yield "1F1B", 1
            return
        most = min(MAX_STAGES_PER_RANK, self.sizes.n_layers // ranks)
        for name in self.values("schedule", SCHEDULES):
            schedule = SCHEDULES[name]
            if schedule.splits_backward and torch.__version__ < SPLIT_BACKWARD_SINCE:
                continue
            counts = [schedule.stages_per_rank] if schedule.stages_per_rank else range(2, most + 1)
            for count in self.values("stages_per_rank", counts):
                if count in counts and count <= most:
                    stages = count * ranks
                    if not required_microbatches(name, ranks, stages, frame.n_microbatches):
                        yield name, count

    def options(self, frame: Frame, schedule: str) -> list[StepOptions]:
        """The legal options, so that each comes after those that cost less."""
        splits = frame.degrees.pipeline > 1 and SCHEDULES[schedule].splits_backward
        gathers = frame.degrees.shard * frame.degrees.context > 1
        # compiled blocks in Float8 recompute these anyway; with a budget, attention too
        pointwise = self.compiled and frame.precision == "bf16"
        key = splits, gathers, pointwise
        if key not in self._known_options:
            self._known_options[key] = self._options(*key)
        return self._known_options[key]

    def _options(self, splits: bool, gathers: bool, pointwise: bool) -> list[StepOptions]:
        found = [
            StepOptions(recompute, activations, optimizer, reshard)
            for recompute in self.values("recompute", RECOMPUTES)
            for activations in self.values("offload_activations", (False, True))
            for optimizer in self.values("offload_optimizer", (False, True))
            for reshard in self.values("reshard", (False, True))
            if not (recompute == "op" and activations)  # check_activation_checkpoint
            and (pointwise or recompute != "pointwise")
            # plan_pipeline refuses it where the backward is split, which recomputation prevents
            and not (reshard and ((splits and recompute == "none") or not gathers))
            and (self.has_optimizer_offload or not optimizer)
        ]
        return sorted(found, key=lambda o: o.offload_optimizer + o.offload_activations + o.reshard)

    def workload(self, choice: LayoutChoice, base: Workload) -> Workload:
        """The step of `base`, of the same precision, with the layout and options of a candidate."""
        frame, options, degrees = choice.frame, choice.options, choice.frame.degrees
        kind, every = RECOMPUTES[options.recompute]
        blocks, ranks = self._stages(choice.schedule, degrees.pipeline, choice.stages_per_rank)
        layout = dataclasses.replace(
            base.layout,
            replicate=degrees.replicate,
            shard=degrees.shard,
            context=degrees.context,
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            expert=degrees.expert,
            expert_tensor=degrees.expert_tensor if degrees.expert > 1 else 0,
            reshard_after_forward=options.reshard,
            schedule=choice.schedule,
            stages_per_rank=choice.stages_per_rank,
            micro_batch=frame.micro_batch,
            n_microbatches=frame.n_microbatches,
            stage_blocks=blocks,
            stage_ranks=ranks,
        )
        return dataclasses.replace(
            base,
            layout=layout,
            recompute=kind,
            recompute_every=every,
            stored_activations=POINTWISE_BUDGET if kind == "memory_budget" else 1.0,
            offload_activations=options.offload_activations,
            offload_optimizer=options.offload_optimizer or base.offload_optimizer,
        )

    def _stages(
        self, schedule: str, ranks: int, stages_per_rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(blocks, pipeline rank) of each stage, as train.py balances and assigns them."""
        stages, key = ranks * stages_per_rank, (schedule, ranks, stages_per_rank)
        if key not in self._known_stages:
            prefix = f"{self.spec.blocks_path}."
            costs = tuple(self.spec.module_flops(self.sizes, self.seq_len).items())
            names_of = balanced_stages(costs, stages)
            blocks = tuple(sum(name.startswith(prefix) for name in names) for names in names_of)
            rank_of = tuple(assign_stages(SCHEDULES[schedule], ranks, stages))
            self._known_stages[key] = blocks, rank_of
        return self._known_stages[key]

    @cached_property
    def _known_stages(self) -> dict[tuple[str, int, int], tuple[tuple[int, ...], tuple[int, ...]]]:
        return {}

    @cached_property
    def _known_options(self) -> dict[tuple[bool, bool, bool], list[StepOptions]]:
        return {}

    def values(self, name: str, default: Iterable[Any]) -> list[Any]:
        """The values of a choice that are searched."""
        if name in self.fixed:
            return [self.fixed[name]]
        known = PUBLISHED.get(name) if self.trusted else None
        return [value for value in default if known is None or value in known]

    def _degrees(self) -> Iterator[Degrees]:
        """Degrees whose product is the number of GPUs, and that can shard the model."""
        for tensor in self._divisors("tensor", self.gpus):
            for context in self._divisors("context", self.gpus // tensor):
                if self.trusted and has_short_context(self.seq_len, context):
                    continue
                if not self._can_shard_sequences(Degrees(context=context, tensor=tensor)):
                    continue
                outer = self.gpus // tensor // context
                for pipeline in self._divisors("pipeline", outer):
                    if pipeline > 1 and not self._can_partition(pipeline):
                        continue
                    data = outer // pipeline
                    for shard in self._divisors("shard", data):
                        degrees = Degrees(data // shard, shard, context, tensor, pipeline)
                        if self.fixed.get("replicate", degrees.replicate) == degrees.replicate:
                            yield from self._with_experts(degrees)

    def _with_experts(self, degrees: Degrees) -> Iterator[Degrees]:
        """The degrees, with every legal way to divide the experts."""
        experts = self.spec.experts(self.sizes)
        for expert in self._divisors("expert", experts.count if experts else 1):
            tensor_degrees = {1, degrees.tensor} if expert > 1 else {1}
            for expert_tensor in self.values("expert_tensor", sorted(tensor_degrees)):
                borrowed = degrees.shard * degrees.context
                borrowed *= 1 if expert_tensor > 1 else degrees.tensor
                divided = dataclasses.replace(degrees, expert=expert, expert_tensor=expert_tensor)
                if (
                    expert_tensor in tensor_degrees
                    and borrowed % expert == 0
                    and not any(check_expert_parallel(divided, experts))
                ):
                    yield divided

    def _divisors(self, name: str, number: int) -> list[int]:
        return [n for n in self.values(name, divisors(number)) if number % n == 0]

    def _can_shard_sequences(self, degrees: Degrees) -> bool:
        problems: list[ConfigError] = [
            *check_tensor_parallel(degrees, self.sizes, self.seq_len, "training.seq_len"),
            *check_context_parallel(degrees, ParallelismConfig(), self.seq_len, "training.seq_len"),
        ]
        return not problems

    def _can_partition(self, pipeline: int) -> bool:
        return pipeline <= self.sizes.n_layers

    def _suits_float8(self, frame: Frame) -> bool:
        if frame.precision == "bf16":
            return True
        tokens = frame.micro_batch * self.seq_len // frame.degrees.context
        gathers = frame.degrees.shard * frame.degrees.context > 1
        return tokens % ALIGNMENT == 0 and (gathers or frame.precision == "float8")


def has_short_context(seq_len: int, context: int) -> bool:
    """Whether a context rank has fewer tokens than in any published run."""
    return context > 1 and seq_len // context < LEAST_TOKENS_PER_CONTEXT_RANK


@lru_cache(maxsize=1024)
def balanced_stages(costs: tuple[tuple[str, float], ...], stages: int) -> list[list[str]]:
    """Module names of each stage; `costs` has (module, cost) in execution order."""
    return balance_stages(dict(costs), stages)


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
