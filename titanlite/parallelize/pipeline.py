"""Pipeline parallel: the plan, the parts of the model that a rank holds, and torch's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,  # private, as the next, which alone runs a schedule from a file (2.11 to 2.15)
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.profiler import record_function

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.models import ModelSizes, ModelSpec
from titanlite.parallelize.fsdp import accumulate_gradients
from titanlite.parallelize.schedule import (
    CSV_KEY,
    SCHEDULES,
    PipelineAction,
    ScheduleSpec,
    action_name,
    build_schedule_order,
    format_action,
    ranks_in_order,
    ranks_of_stages,
    read_schedule_csv,
    required_microbatches,
)
from titanlite.parallelize.stage_partition import (
    partition_model,
    requested_stages,
    stage_contradictions,
)

DEGREE = "parallelism.pipeline_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


@dataclass(frozen=True)
class PipelinePlan:
    """Who runs which part of the model, in which order, on how much at once."""

    schedule: str
    csv: Path | None  # a file that says the order instead
    stages: list[list[str]]  # the modules of each stage
    costs: list[float]  # of each stage, FLOPs a token
    rank_of: list[int]  # the pipeline rank that holds each stage
    microbatch: int  # sequences
    microbatches: int  # of one run of the schedule
    splits_backward: bool = False  # in halves, of which the second comes later

    @property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def rows(self) -> int:
        """Sequences of one run of the schedule."""
        return self.microbatch * self.microbatches

    def fitting(self, rows: int) -> PipelinePlan:
        """The same for `rows` sequences in one run, or as few more as the schedule takes."""
        microbatches, stages = -(-rows // self.microbatch), len(self.stages)
        if self.csv is not None:  # which has its number
            return self
        while required_microbatches(self.schedule, self.ranks, stages, microbatches):
            microbatches += 1
        return replace(self, microbatches=microbatches)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def held_by(self, stage: int) -> str:
        """What a stage holds, in words: "tok_embeddings, layers 0-3"."""
        said: list[str] = []
        for path, run in groupby(self.stages[stage], lambda name: name.rpartition(".")[0]):
            names = [name.rpartition(".")[2] for name in run]
            ends = dict.fromkeys((names[0], names[-1]))
            said += [f"{path} {'-'.join(ends)}"] if path else names
        return ", ".join(said)

    def order(self) -> list[list[PipelineAction]]:
        """What each pipeline rank does, in order."""
        if self.csv is not None:
            return read_schedule_csv(self.csv)
        return build_schedule_order(self.schedule, self.ranks, len(self.stages), self.microbatches)

    def __str__(self) -> str:
        name, size = self.csv or self.schedule, self.microbatch
        return f"{name}, {len(self.stages)} stages, {self.microbatches} micro-batches of {size}"


def plan_pipeline(
    section: ParallelismConfig, spec: ModelSpec, sizes: ModelSizes, seq_len: int, local_batch: int
) -> tuple[PipelinePlan | None, list[ConfigError]]:
    """The plan that a section means, or else everything that stands against it."""
    costs = spec.module_flops(sizes, seq_len)
    ranks = section.pipeline_parallel_degree
    if ranks == 1:  # one stage, which holds everything
        everything = [sum(costs.values())]
        return PipelinePlan("1F1B", None, [list(costs)], everything, [0], local_batch, 1), []
    problems = list(_plain_problems(section, spec, sizes, local_batch))
    size, stages, rank_of = section.pipeline_parallel_microbatch_size, [], []
    problems += stage_contradictions(section)
    try:
        style, count, rank_of = _stages(section, sizes)
        problems += _schedule_problems(section, style, rank_of, local_batch)
        stages = partition_model(section, costs, spec.blocks_path, count)
    except ConfigError as error:
        problems.append(error)
    if problems:
        return None, problems
    spent = [sum(costs[name] for name in names) for names in stages]
    schedule, file = section.pipeline_parallel_schedule, _csv(section)
    runs = (size, local_batch // size, style.splits_backward)
    return PipelinePlan(schedule, file, stages, spent, rank_of, *runs), []


def _csv(section: ParallelismConfig) -> Path | None:
    file = section.pipeline_parallel_schedule_csv
    return Path(file) if file else None


def _name(section: ParallelismConfig) -> str:
    if section.pipeline_parallel_schedule_csv:
        return f'{CSV_KEY} = "{section.pipeline_parallel_schedule_csv}"'
    return f'{SCHEDULE} = "{section.pipeline_parallel_schedule}"'


def _plain_problems(
    section: ParallelismConfig, spec: ModelSpec, sizes: ModelSizes, local_batch: int
) -> Iterator[ConfigError]:
    if spec.tied_parameters(sizes):
        yield ConfigError(
            f"{DEGREE} = {section.pipeline_parallel_degree}: the embedding and the output layer are"
            " the same weights (model.tied_embeddings), but belong to the first and last stage.",
            fix="Use other degrees, or model.tied_embeddings = false.",
            keys=(DEGREE, "model.tied_embeddings"),
        )
    size = section.pipeline_parallel_microbatch_size
    if local_batch % size:
        yield ConfigError(
            f"{MICROBATCH} = {size}: does not divide training.local_batch_size = {local_batch}.",
            fix=f"Use a divisor of {local_batch}.",
            keys=(MICROBATCH, "training.local_batch_size"),
        )


def _stages(section: ParallelismConfig, sizes: ModelSizes) -> tuple[ScheduleSpec, int, list[int]]:
    """(style, stages, the rank of each) of the schedule of a section; raises ConfigError."""
    ranks, file = section.pipeline_parallel_degree, _csv(section)
    if file is not None:
        order = read_schedule_csv(file)
        rank_of, _ = ranks_in_order(file, order)
        halves = any(action.kind == "weight" for actions in order for action in actions)
        stages, key = requested_stages(section, sizes.n_layers, len(rank_of))
        if len(order) != ranks or stages != len(rank_of):
            raise ConfigError(
                f"{_name(section)}: is for {len(order)} ranks and {len(rank_of)} stages;"
                f" the job has {ranks} ranks and {stages} stages.",
                fix=f"Change the file, {DEGREE}, or parallelism.{key}.",
                keys=(CSV_KEY, DEGREE, f"parallelism.{key}"),
            )
        return ScheduleSpec(splits_backward=halves), stages, rank_of
    style = SCHEDULES[section.pipeline_parallel_schedule]
    each = style.stages_a_rank or 2
    stages, key = requested_stages(section, sizes.n_layers, each * ranks)
    a_rank, rest = divmod(stages, ranks)
    if rest or a_rank < each or (style.stages_a_rank and a_rank > each):
        more = "" if style.stages_a_rank else " or more"
        wants = f"{each}{more} stages on each rank"
        raise ConfigError(
            f"{_name(section)}: wants {wants}, of {ranks} ranks; parallelism.{key} makes {stages}.",
            fix=f"Make {each * ranks} stages"
            + ("." if style.stages_a_rank else ", or a multiple."),
            keys=(SCHEDULE, DEGREE, f"parallelism.{key}"),
        )
    return style, stages, ranks_of_stages(style, ranks, stages)


def _schedule_problems(
    section: ParallelismConfig, style: ScheduleSpec, rank_of: list[int], local_batch: int
) -> Iterator[ConfigError]:
    ranks, file = section.pipeline_parallel_degree, _csv(section)
    size = section.pipeline_parallel_microbatch_size
    microbatches, rest = divmod(local_batch, size)
    if file is None:
        name = section.pipeline_parallel_schedule
        wanted = required_microbatches(name, ranks, len(rank_of), microbatches)
    else:
        _, in_file = ranks_in_order(file, read_schedule_csv(file))
        wanted = str(in_file) if in_file != microbatches else None
    if wanted and not rest:
        yield ConfigError(
            f"{_name(section)}: wants {wanted} micro-batches on {ranks} ranks;"
            f" training.local_batch_size = {local_batch} in micro-batches of {size} makes"
            f" {microbatches}.",
            fix="Change training.local_batch_size or the size of a micro-batch.",
            keys=(SCHEDULE, CSV_KEY, MICROBATCH, "training.local_batch_size"),
        )
    if style.splits_backward and section.fsdp_reshard_after_forward == "always":
        yield ConfigError(
            f'parallelism.fsdp_reshard_after_forward = "always": under {_name(section)},'
            " which splits the backward, torch would compute wrong gradients.",
            fix='Use "default" or "never".',
            keys=("parallelism.fsdp_reshard_after_forward", SCHEDULE),
        )


def build_stage_modules(
    spec: ModelSpec, sizes: ModelSizes, plan: PipelinePlan, rank: int
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """(all that a pipeline rank holds, as one module; its stages by number, made of the same).

    Names are those of the whole model, so a checkpoint does not know of stages. On meta.
    """
    with torch.device("meta"):
        held = spec.build(sizes)
        if len(plan.stages) == 1:
            return held, {0: held}
        parts = {number: spec.build(sizes) for number in plan.stages_of(rank)}
    for number, part in parts.items():
        _keep(part, plan.stages[number], spec.blocks_path)
        if number < len(plan.stages) - 1:
            part.register_forward_hook(_plain)
    _keep(held, [name for number in parts for name in plan.stages[number]], spec.blocks_path)
    for number, part in parts.items():
        for name in plan.stages[number]:
            held.set_submodule(name, part.get_submodule(name))
    return held, parts


def _plain(part: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """What can be sent: tensor parallel may end in a view, which torch's stage cannot detach in
    place, or in a tensor that is still on its way."""
    return output.clone() if output._is_view() or type(output) is not Tensor else output


def _keep(model: nn.Module, names: list[str], block_path: str) -> None:
    """Let go of every block and end of a model that is not named."""
    blocks = model.get_submodule(block_path)
    for key in [key for key in blocks if f"{block_path}.{key}" not in names]:
        del blocks[key]
    for name in [name for name, _ in model.named_children() if name != block_path]:
        if name not in names:
            setattr(model, name, None)


_HOOKS = (  # undocumented, so a torch that renames one (other than 2.13) must not go unnoticed
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "perform_reduce_grad",
    "get_local_bwd_output",
    "set_local_bwd_input",
)
assert all(hasattr(PipelineStage, name) for name in _HOOKS), "this torch has other stages"


class TrainStage(PipelineStage):
    """Torch's stage, which also tells a profiler what it runs, without its waiting, and adds up
    the gradients of micro-batches in the reduce dtype under every schedule."""

    activity = "pipeline"
    reduces = True  # this run of the schedule is the last before the optimizer's step

    def forward_one_chunk(self, fwd_chunk_id, *args, **kwargs):
        with record_function(action_name(self.activity, "forward", self.stage_index, fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, **kwargs):
        kind = "backward" if full_backward else "input"
        with record_function(action_name(self.activity, kind, self.stage_index, bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, **kwargs)
        accumulate_gradients(self.submod)

    def backward_weight_one_chunk(self, bwd_chunk_id, **kwargs):
        with record_function(action_name(self.activity, "weight", self.stage_index, bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, **kwargs)
        accumulate_gradients(self.submod)

    def perform_reduce_grad(self, grad_scale_factor):
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)


class EvalStage(TrainStage):
    """A stage that is only evaluated: there are no gradients to hand to a stage beside it, which
    torch's schedules that fold (2.13) would ask for all the same, nor any to reduce."""

    activity = "evaluation"
    reduces = False

    def get_local_bwd_output(self, mb_index):
        return (None,)

    def set_local_bwd_input(self, next_stage_bwd_outputs, mb_index):
        pass


def build_schedule(
    kind: type[TrainStage],
    parts: Mapping[int, nn.Module],
    plan: PipelinePlan,
    pp: DeviceMesh,
    device: torch.device,
    hidden: tuple[int, ...],
    dtype: torch.dtype,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> tuple[PipelineScheduleSingle | PipelineScheduleMulti, list[TrainStage]]:
    """(torch's schedule, its stages) over this rank's parts, for micro-batches whose
    stages hand on activations of the shape `hidden`.

    The shapes are stated: to find them out, torch would run the model once more (2.13), and reuse
    the buffers of an old shape for a new one.
    """
    between = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
    tokens = torch.empty(hidden[:2], dtype=torch.int64, device="meta")
    stages = [
        kind(
            part,
            number,
            len(plan.stages),
            device,
            input_args=between if number else tokens,
            output_args=between,  # the last one's is not sent to anyone
            group=pp.get_group(),
        )
        for number, part in parts.items()
    ]
    options = {"n_microbatches": plan.microbatches, "loss_fn": loss, "scale_grads": False}
    if plan.csv is not None:
        schedule = _PipelineScheduleRuntime(stages, **options)
        # What was checked, not what torch would read: it takes blank lines for ranks.
        rows = [[_Action.from_str(format_action(action)) for action in row] for row in plan.order()]
        schedule.pipeline_order = dict(enumerate(rows))
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
        return schedule, stages
    scheduled = get_schedule_class(plan.schedule)
    alone = issubclass(scheduled, PipelineScheduleSingle)
    return scheduled(stages[0] if alone else stages, **options), stages
