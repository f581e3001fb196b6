"""Plan of pipeline parallelism: stages, their ranks, and the order in which they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.log import pluralize
from titanlite.models import ModelSizes, ModelSpec
from titanlite.models.sizes import prediction_layers
from titanlite.parallelize.schedule import (
    CSV_KEY,
    SCHEDULES,
    PipelineAction,
    assign_stages,
    build_schedule_order,
    check_csv_order,
    read_schedule_csv,
    required_microbatches,
)
from titanlite.parallelize.stage_partition import partition_model, requested_stages

DEGREE_KEY = "parallelism.pipeline_parallel_degree"
SCHEDULE_KEY = "parallelism.pipeline_parallel_schedule"
MICROBATCH_KEY = "parallelism.pipeline_parallel_microbatch_size"
# After the input gradients, torch 2.11 frees what the weight gradients need; 2.12 was not tried.
SPLIT_BACKWARD_SINCE = "2.13"


@dataclass(frozen=True)
class PipelinePlan:
    """Which pipeline rank runs which modules, in which order, on micro-batches of which size."""

    schedule: str  # the name of one of torch's schedules
    csv: Path | None  # a file that lists the actions; replaces `schedule`
    stages: list[list[str]]  # module names of each stage
    rank_of: list[int]  # pipeline rank of each stage
    microbatch_size: int  # sequences
    n_microbatches: int  # in one run of the schedule

    @property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def sequences(self) -> int:
        """Sequences in one run of the schedule."""
        return self.microbatch_size * self.n_microbatches

    def for_sequences(self, sequences: int) -> PipelinePlan:
        """This plan with the fewest micro-batches that hold `sequences` and suit the schedule."""
        if self.csv is not None:  # the file fixes the number of micro-batches
            return self
        count = -(-sequences // self.microbatch_size)
        while required_microbatches(self.schedule, self.ranks, len(self.stages), count):
            count += 1
        return replace(self, n_microbatches=count)

    def stages_of(self, rank: int) -> list[int]:
        """Stages of a pipeline rank, in model order."""
        return [stage for stage, owner in enumerate(self.rank_of) if owner == rank]

    def stage_of(self, parameter: str) -> int:
        """The stage that has a parameter of the model, by its name."""
        return next(
            stage
            for stage, modules in enumerate(self.stages)
            if any(parameter.startswith(f"{module}.") for module in modules)
        )

    def order(self) -> list[list[PipelineAction]]:
        """Actions of each pipeline rank, in execution order."""
        if self.csv is not None:
            return read_schedule_csv(self.csv)
        n_stages = len(self.stages)
        return build_schedule_order(self.schedule, self.ranks, n_stages, self.n_microbatches)

    def __str__(self) -> str:
        name, count, size = self.csv or self.schedule, self.n_microbatches, self.microbatch_size
        return f"{name}, {len(self.stages)} stages, {count} micro-batches of {size}"


def plan_pipeline(
    config: ParallelismConfig,
    spec: ModelSpec,
    sizes: ModelSizes,
    seq_len: int,
    local_batch: int,
    splits_backward: bool = True,
) -> tuple[PipelinePlan | None, list[ConfigError]]:
    """(the plan, []) or (None, every reason why these settings are invalid).

    `splits_backward` as in ModelTransforms; false with multi-token prediction: torch 2.13 frees
    the graph of the copied embedding with the first of several blocks that use it.
    """
    splits_backward = splits_backward and not prediction_layers(sizes)
    costs = spec.module_flops(sizes, seq_len)
    if config.pipeline_parallel_degree == 1:  # one stage with all modules
        return PipelinePlan("1F1B", None, [list(costs)], [0], local_batch, 1), []
    errors = []
    size = config.pipeline_parallel_microbatch_size
    if local_batch % size:
        errors.append(
            ConfigError(
                f"{MICROBATCH_KEY} = {size}: does not divide training.local_batch_size ="
                f" {local_batch}.",
                fix=f"Use a divisor of {local_batch}.",
            )
        )
    try:
        assignment = _assign_stages_to_ranks(config, sizes)
        errors += _check_schedule(config, assignment, local_batch, splits_backward)
        stages = partition_model(config, costs, spec.blocks_path, len(assignment.rank_of))
        if spec.tied_parameters(sizes):
            stages = _give_parameters_to_each_rank(config, stages, assignment, spec.output_path)
    except ConfigError as error:
        errors.append(error)
    if errors:
        return None, errors
    stages = [*stages[:-1], [*stages[-1], *spec.prediction_modules(sizes)]]
    plan = PipelinePlan(
        schedule=config.pipeline_parallel_schedule,
        csv=Path(file) if (file := config.pipeline_parallel_schedule_csv) else None,
        stages=stages,
        rank_of=assignment.rank_of,
        microbatch_size=size,
        n_microbatches=local_batch // size,
    )
    return plan, []


def _schedule_setting(config: ParallelismConfig) -> str:
    """The key that selects the schedule, with its value, for error messages."""
    if config.pipeline_parallel_schedule_csv:
        return f'{CSV_KEY} = "{config.pipeline_parallel_schedule_csv}"'
    return f'{SCHEDULE_KEY} = "{config.pipeline_parallel_schedule}"'


class _StageAssignment(NamedTuple):
    """What the schedule or its file determines."""

    rank_of: list[int]  # pipeline rank of each stage
    splits_backward: bool
    microbatches: int | None = None  # None: any number that suits the schedule


def _give_parameters_to_each_rank(
    config: ParallelismConfig, stages: list[list[str]], assignment: _StageAssignment, output: str
) -> list[list[str]]:
    """Stages of which no rank has the tied output layer alone, whose weight another rank trains.

    Its stage gets the norm from the stage before. Raises ConfigError if the user listed the stages.
    """
    *_, before, last = stages
    if last != [output] or assignment.rank_of.count(assignment.rank_of[-1]) > 1:
        return stages
    if config.module_fqns_per_model_part or len(before) == 1:
        raise ConfigError(
            f'parallelism.module_fqns_per_model_part: the last rank would have "{output}" only,'
            " whose weight the first rank trains (tied embeddings), and no parameter of its own.",
            fix=f'Move "{before[-1]}" to the last stage.',
        )
    return [*stages[:-2], before[:-1], [before[-1], output]]


def _assign_stages_to_ranks(config: ParallelismConfig, sizes: ModelSizes) -> _StageAssignment:
    """Number of stages and their ranks, from the schedule; raises ConfigError."""
    if config.pipeline_parallel_schedule_csv:
        return _assign_stages_by_csv(config, sizes)
    ranks, schedule = config.pipeline_parallel_degree, SCHEDULES[config.pipeline_parallel_schedule]
    per_rank = schedule.stages_per_rank or 2
    stages, key = requested_stages(config, sizes.n_layers, default=per_rank * ranks)
    actual, remainder = divmod(stages, ranks)
    exact = schedule.stages_per_rank is not None
    if remainder or actual < per_rank or (exact and actual > per_rank):
        required = f"{pluralize(per_rank, 'stage')}{'' if exact else ' or more'} per rank"
        raise ConfigError(
            f"{_schedule_setting(config)}: requires {required};"
            f" parallelism.{key} makes {stages} stages for {ranks} ranks.",
            fix=f"Make {per_rank * ranks} stages"
            f"{'' if exact else f', or a larger multiple of {ranks}'}.",
        )
    return _StageAssignment(assign_stages(schedule, ranks, stages), schedule.splits_backward)


def _assign_stages_by_csv(config: ParallelismConfig, sizes: ModelSizes) -> _StageAssignment:
    ranks, file = config.pipeline_parallel_degree, Path(config.pipeline_parallel_schedule_csv)
    order = read_schedule_csv(file)
    rank_of, microbatches = check_csv_order(file, order)
    stages, key = requested_stages(config, sizes.n_layers, default=len(rank_of))
    if len(order) != ranks or stages != len(rank_of):
        keys = dict.fromkeys((DEGREE_KEY, f"parallelism.{key}"))  # `key` may be the degree
        raise ConfigError(
            f"{_schedule_setting(config)}: is for {len(order)} ranks and {len(rank_of)} stages;"
            f" the job has {ranks} ranks and {stages} stages.",
            fix=f"Change {' or '.join(('the file', *keys))}.",
        )
    splits_backward = any(action.kind == "weight" for actions in order for action in actions)
    return _StageAssignment(rank_of, splits_backward, microbatches)


def _check_schedule(
    config: ParallelismConfig, assignment: _StageAssignment, local_batch: int, splits_backward: bool
) -> Iterator[ConfigError]:
    """Reject micro-batches, an FSDP setting or a torch that the schedule does not work with."""
    ranks, size = config.pipeline_parallel_degree, config.pipeline_parallel_microbatch_size
    microbatches, remainder = divmod(local_batch, size)
    if assignment.microbatches is None:
        name, stages = config.pipeline_parallel_schedule, len(assignment.rank_of)
        required = required_microbatches(name, ranks, stages, microbatches)
    else:
        in_file = assignment.microbatches
        required = str(in_file) if in_file != microbatches else None
    if required and not remainder:
        yield ConfigError(
            f"{_schedule_setting(config)}: requires {required} micro-batches on {ranks} ranks;"
            f" training.local_batch_size = {local_batch} in micro-batches of {size} makes"
            f" {microbatches}.",
            fix=f"Change training.local_batch_size or {MICROBATCH_KEY}.",
        )
    if assignment.splits_backward and torch.__version__ < SPLIT_BACKWARD_SINCE:
        yield ConfigError(
            f"{_schedule_setting(config)}: splits the backward, which needs torch 2.13 or newer;"
            f" this is {torch.__version__}.",
            fix="Install a newer torch, or use GPipe, 1F1B, Interleaved1F1B or LoopedBFS.",
        )
    keeps_split = splits_backward and assignment.splits_backward
    if keeps_split and config.fsdp_reshard_after_forward == "always":
        yield ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always": torch would compute wrong'
            f" gradients under {_schedule_setting(config)}, which splits the backward.",
            fix='Use "default" or "never", or recompute or compile, which keep the backward whole.',
        )
