"""Pipeline schedules, by name or from a CSV file: requirements, order of actions."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

from titanlite.errors import ConfigError

# A backward is one action, or two: "input" computes input gradients, "weight" weight gradients.
ActionKind = Literal["forward", "backward", "input", "weight"]
ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
CSV_KEY = "parallelism.pipeline_parallel_schedule_csv"


class PipelineAction(NamedTuple):
    """The forward or (half of a) backward of one micro-batch on one stage."""

    kind: ActionKind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class ScheduleSpec:
    """Properties of a schedule that constrain stages and FSDP."""

    stages_per_rank: int | None = None  # None: two or more
    v_shaped: bool = False  # rank r has the r-th stage and the r-th from the end
    splits_backward: bool = False  # in two actions; FSDP must not free weights between them


SCHEDULES = {
    "GPipe": ScheduleSpec(1),
    "1F1B": ScheduleSpec(1),
    "Interleaved1F1B": ScheduleSpec(),
    "LoopedBFS": ScheduleSpec(),
    "InterleavedZeroBubble": ScheduleSpec(splits_backward=True),
    "ZBVZeroBubble": ScheduleSpec(2, v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleSpec(2, v_shaped=True, splits_backward=True),
}


def assign_stages(schedule: ScheduleSpec, ranks: int, stages: int) -> list[int]:
    """Pipeline rank of each stage."""
    if schedule.v_shaped:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


def required_microbatches(name: str, ranks: int, stages: int, microbatches: int) -> str | None:
    """What schedule `name` requires, as text, if it cannot run `microbatches`; else None."""
    minimum = {"1F1B": ranks, "DualPipeV": stages}.get(name, 1)
    if microbatches < minimum:
        return f"{minimum} or more"

    def has_equal_rounds(number: int) -> bool:
        return number % max(1, number // ranks) == 0

    if name not in ("Interleaved1F1B", "InterleavedZeroBubble") or has_equal_rounds(microbatches):
        return None
    fewer = next(n for n in range(microbatches, 0, -1) if has_equal_rounds(n))
    more = next(n for n in count(microbatches) if has_equal_rounds(n))
    return f"{fewer} or {more} (the nearest n with n % (n // {ranks}) = 0)"


def build_schedule_order(
    name: str, ranks: int, stages: int, microbatches: int
) -> list[list[PipelineAction]]:
    """Actions of each pipeline rank, in execution order, under one of torch's schedules."""
    if SCHEDULES[name].stages_per_rank == 1:
        # Not from torch (2.13), which lists GPipe and 1F1B with one micro-batch too many.
        return [_one_stage_order(name, rank, ranks, microbatches) for rank in range(ranks)]
    # By torch's class, as in torch's own visualizer (2.11 to 2.15), without a process group; unlike
    # there, without its mocked stages and without the transfers, which take most of its time.
    from torch.distributed.pipelining.schedules import get_schedule_class

    # it adds transfers and all-gathers to the order, which is complete before
    without_transfers = {"_prepare_schedule_with_comms": lambda *_, **__: None}
    order_only: Any = type(name, (get_schedule_class(name),), without_transfers)
    stage = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=stages, submod=None)
    schedule = order_only([stage] * (stages // ranks), microbatches)
    rows = (schedule.pipeline_order[rank] for rank in range(ranks))
    return [[action for cell in row for action in _from_torch_action(cell)] for row in rows]


def _one_stage_order(name: str, rank: int, ranks: int, microbatches: int) -> list[PipelineAction]:
    """GPipe: all forwards, then all backwards. 1F1B: `ranks - rank` forwards, then alternate."""
    warmup = microbatches if name == "GPipe" else min(microbatches, ranks - rank)
    forwards = [PipelineAction("forward", rank, number) for number in range(microbatches)]
    backwards = [PipelineAction("backward", rank, number) for number in range(microbatches)]
    steady = zip(backwards, forwards[warmup:], strict=False)
    order = [*forwards[:warmup], *(action for pair in steady for action in pair)]
    return order + backwards[microbatches - warmup :]


_CSV_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_KIND_OF_LETTER: dict[str, ActionKind] = {kind[0].upper(): kind for kind in ACTION_KINDS}


def read_schedule_csv(path: Path) -> list[list[PipelineAction]]:
    """Read the actions of each pipeline rank from a CSV file, one line per rank.

    A cell is stage, letter, micro-batch: 0F1 (forward), 0B1 (backward), or its halves 0I1 and 0W1;
    empty cells and blank lines are ignored. Raises ConfigError.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row)) or row[1:]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'{CSV_KEY} = "{path}": cannot be read ({reason}).',
            fix="Give a file with one line per pipeline rank.",
        ) from None
    return [_parse_csv_row(path, number, row) for number, row in rows]


def _parse_csv_row(path: Path, number: int, row: list[str]) -> list[PipelineAction]:
    actions = []
    for cell in filter(None, map(str.strip, row)):
        match = _CSV_CELL.fullmatch(cell)
        if match is None:
            problem = f'line {number}: "{cell[:40]}" is not an action.'
            raise _csv_error(path, problem, "Write one such as 0F1.")
        stage, letter, microbatch = match.groups()
        actions.append(PipelineAction(_KIND_OF_LETTER[letter], int(stage), int(microbatch)))
    if not actions:
        raise _csv_error(path, f"line {number}: has no action.", "Give every rank a stage.")
    return actions


def _from_torch_action(cell) -> list[PipelineAction]:
    """A torch action as `PipelineAction`s: two if it overlaps two, none if idle or a transfer."""
    if cell is None:
        return []
    if getattr(cell, "sub_actions", None):
        return [action for part in cell.sub_actions for action in _from_torch_action(part)]
    kind = _KIND_OF_LETTER.get(cell.computation_type.value)
    return [PipelineAction(kind, cell.stage_index, cell.microbatch_index)] if kind else []


def check_csv_order(path: Path, order: Sequence[Sequence[PipelineAction]]) -> tuple[list[int], int]:
    """(pipeline rank of each stage, number of micro-batches) of a schedule from a file.

    Raises ConfigError for a missing or repeated action, a stage on two ranks, and a deadlock.
    """
    rank_of: dict[int, int] = {}
    kinds_of: dict[tuple[int, int], set[str]] = defaultdict(set)  # of a stage and micro-batch
    for rank, actions in enumerate(order):
        for action in actions:
            kind, stage, microbatch = action
            if rank_of.setdefault(stage, rank) != rank:
                problem = f"stage {stage} is on pipeline ranks {rank_of[stage]} and {rank}."
                raise _csv_error(path, problem, "Put all actions of a stage on one line.")
            if kind in kinds_of[stage, microbatch]:
                problem = f"{format_action(action)} is listed twice."
                raise _csv_error(path, problem, "Remove one.")
            kinds_of[stage, microbatch].add(kind)
    if not rank_of:
        raise _csv_error(path, "it is empty.", "Write one line per pipeline rank.")
    stages, microbatches = (range(max(numbers) + 1) for numbers in zip(*kinds_of, strict=True))
    for stage, microbatch in product(stages, microbatches):
        kinds = kinds_of[stage, microbatch]
        if kinds not in ({"forward", "backward"}, {"forward", "input", "weight"}):
            listed = ", ".join(sorted(kinds)) or "no action"
            problem = f"stage {stage}, micro-batch {microbatch} has {listed}."
            fix = "It needs forward and backward, or forward, input and weight."
            raise _csv_error(path, problem, fix)
    ended = {action for _, action, _ in iterate_runnable(order)}
    left = [[action for action in actions if action not in ended] for actions in order]
    if blocked := [format_action(actions[0]) for actions in left if actions]:
        problem = f"it would deadlock: {' and '.join(blocked)} cannot start."
        raise _csv_error(path, problem, "Change the order.")
    return [rank_of[stage] for stage in stages], len(microbatches)


def format_action(action: PipelineAction) -> str:
    """An action as a CSV cell, such as 0F1."""
    return f"{action.stage}{action.kind[0].upper()}{action.microbatch}"


def _csv_error(path: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError(f'{CSV_KEY} = "{path}": {problem}', fix=fix)


def iterate_runnable(
    order: Sequence[Sequence[PipelineAction]],
) -> Iterator[tuple[int, PipelineAction, list[PipelineAction]]]:
    """Yield (rank, action, actions that end before it starts), in an order in which they can run.

    Ends early if the pipeline ranks would wait for each other.
    """
    last_stage = max(action.stage for actions in order for action in actions)
    ended: set[PipelineAction] = set()
    counts = [0] * len(order)  # of the actions of each rank that have ended
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(order):
            while counts[rank] < len(actions):  # a slice would be copied at every pass
                action = actions[counts[rank]]
                dependencies = _dependencies(action, last_stage, ended)
                if not ended.issuperset(dependencies):
                    break
                yield rank, action, dependencies
                ended.add(action)
                counts[rank] += 1
                progressed = True


def _dependencies(
    action: PipelineAction, last_stage: int, ended: set[PipelineAction]
) -> list[PipelineAction]:
    """Actions that must end before `action` starts: true once they all have, as in `ended`."""
    kind, stage, microbatch = action
    if kind == "forward":
        return [PipelineAction("forward", stage - 1, microbatch)] if stage else []
    if kind == "weight":
        return [PipelineAction("input", stage, microbatch)]
    dependencies = [PipelineAction("forward", stage, microbatch)]
    if stage < last_stage:  # the next stage may split its backward or not
        split = PipelineAction("input", stage + 1, microbatch)
        unsplit = PipelineAction("backward", stage + 1, microbatch)
        dependencies.append(split if split in ended else unsplit)
    return dependencies


def format_trace_name(activity: str, kind: str, stage: int, microbatch: int) -> str:
    """Name of an action in a profiler trace; `activity` is "pipeline" in training steps."""
    return f"{activity} {kind} {stage} {microbatch}"
