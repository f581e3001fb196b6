"""Pipeline schedules, by name or from a file: what they need, their order, how long they idle."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from titanlite.errors import ConfigError

Kind = Literal["forward", "backward", "input", "weight"]  # input and weight: a backward's halves
CSV_KEY = "parallelism.pipeline_parallel_schedule_csv"


class PipelineAction(NamedTuple):
    """One micro-batch through one stage, in one direction."""

    kind: Kind
    stage: int
    microbatch: int


class TimedAction(NamedTuple):
    """An action, and when it runs."""

    action: PipelineAction
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule wants of the stages of a rank."""

    stages_a_rank: int | None = None  # None: two or more
    folded: bool = False  # a rank holds the i-th stage from the front and the i-th from the back
    splits_backward: bool = False  # in halves, which FSDP must not free weights between


SCHEDULES = {
    "GPipe": ScheduleSpec(1),
    "1F1B": ScheduleSpec(1),
    "Interleaved1F1B": ScheduleSpec(),
    "LoopedBFS": ScheduleSpec(),
    "InterleavedZeroBubble": ScheduleSpec(splits_backward=True),
    "ZBVZeroBubble": ScheduleSpec(2, folded=True, splits_backward=True),
    "DualPipeV": ScheduleSpec(2, folded=True, splits_backward=True),
}


def ranks_of_stages(style: ScheduleSpec, ranks: int, stages: int) -> list[int]:
    """The pipeline rank that holds each stage."""
    if style.folded:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


def required_microbatches(name: str, ranks: int, stages: int, microbatches: int) -> str | None:
    """What schedule `name` wants of the number of micro-batches, if this one is not right."""
    least = {"1F1B": ranks, "DualPipeV": stages}.get(name, 1)
    if microbatches < least:
        return f"{least} or more"
    if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            return f"a multiple of {ranks}, the pipeline ranks"
    return None


def build_schedule_order(
    name: str, ranks: int, stages: int, microbatches: int
) -> list[list[PipelineAction]]:
    """What each pipeline rank does, in order, under one of torch's schedules."""
    if (
        SCHEDULES[name].stages_a_rank == 1
    ):  # torch (2.13) lists these two with a micro-batch too many
        return [_simple_order(name, rank, ranks, microbatches) for rank in range(ranks)]
    # Private, but what torch draws its schedules with; it needs no process group (2.11 to 2.15).
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops(name, ranks, microbatches, stages // ranks)
    return [[action for cell in row for action in _actions(cell)] for row in rows]


def _simple_order(name: str, rank: int, ranks: int, microbatches: int) -> list[PipelineAction]:
    """GPipe: all forwards, then all backwards. 1F1B: only so many ahead as keep all ranks busy."""
    ahead = microbatches if name == "GPipe" else min(microbatches, ranks - rank)
    forwards = [PipelineAction("forward", rank, number) for number in range(microbatches)]
    backwards = [PipelineAction("backward", rank, number) for number in range(microbatches)]
    steady = zip(backwards, forwards[ahead:], strict=False)
    done = [*forwards[:ahead], *(action for pair in steady for action in pair)]
    return done + backwards[microbatches - ahead :]


_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


def read_schedule_csv(path: Path) -> list[list[PipelineAction]]:
    """The same from a CSV: a line a rank, cells such as 0F1 (stage 0, forward, micro-batch 1), 0B1
    (backward), or its halves 0I1 and 0W1; an empty cell is a pause. Raises ConfigError."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f'{CSV_KEY} = "{path}": cannot be read ({why}).',
            fix="Give a file with a line for each pipeline rank.",
            keys=(CSV_KEY,),
        ) from None
    order: list[list[PipelineAction]] = []
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row if cell.strip()]
        for cell in cells:
            if not _CELL.fullmatch(cell):
                what = f'line {number}: "{cell[:40]}" is no action.'
                raise _wrong_csv(path, what, "Write one such as 0F1.")
        if not cells:
            raise _wrong_csv(path, f"line {number}: has no stage.", "Give every rank one.")
        found = (_CELL.fullmatch(cell).groups() for cell in cells)
        order.append(
            [PipelineAction(_KINDS[k], int(stage), int(number)) for stage, k, number in found]
        )
    return order


def _actions(cell) -> list[PipelineAction]:
    """Torch's action as ours: two where it overlaps two, none where it idles or communicates."""
    if cell is None:
        return []
    if getattr(cell, "sub_actions", None):
        return [action for part in cell.sub_actions for action in _actions(part)]
    kind = _KINDS.get(cell.computation_type.value)
    return [PipelineAction(kind, cell.stage_index, cell.microbatch_index)] if kind else []


def ranks_in_order(path: Path, order: Sequence[Sequence[PipelineAction]]) -> tuple[list[int], int]:
    """(the rank of each stage, micro-batches) of a schedule from a file; raises ConfigError where
    an action is missing, there twice, on two ranks, or would wait for ever."""
    rank_of: dict[int, int] = {}
    seen: set[PipelineAction] = set()
    kinds_of: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank, actions in enumerate(order):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                lines = f"lines {rank_of[action.stage] + 1} and {rank + 1}"
                what = f"stage {action.stage} is on {lines}."
                raise _wrong_csv(path, what, "A stage stays on one rank.")
            if action in seen:
                raise _wrong_csv(path, f"{format_action(action)} is there twice.", "Remove one.")
            seen.add(action)
            kinds_of[action.stage, action.microbatch].add(action.kind)
    stages = max(rank_of, default=-1) + 1
    microbatches = max((action.microbatch for action in seen), default=-1) + 1
    for stage in range(stages):
        for microbatch in range(microbatches):
            kinds = kinds_of[stage, microbatch]
            if kinds not in ({"forward", "backward"}, {"forward", "input", "weight"}):
                has = ", ".join(sorted(kinds)) or "nothing"
                what = f"stage {stage}, micro-batch {microbatch} has {has}."
                raise _wrong_csv(path, what, "It needs F and B, or F, I and W.")
    if not stages:
        raise _wrong_csv(path, "it is empty.", "Write a line for each pipeline rank.")
    try:
        simulate_schedule(order, [1.0] * stages)
    except ScheduleDeadlock as error:
        raise _wrong_csv(path, f"it would wait for ever: {error}.", "Change the order.") from None
    return [rank_of[stage] for stage in range(stages)], microbatches


def format_action(action: PipelineAction) -> str:
    """An action as a cell of a CSV."""
    return f"{action.stage}{action.kind[0].upper()}{action.microbatch}"


def _wrong_csv(path: Path, what: str, fix: str) -> ConfigError:
    return ConfigError(f'{CSV_KEY} = "{path}": {what}', fix=fix, keys=(CSV_KEY,))


class ScheduleDeadlock(Exception):
    """Every rank waits for another."""


def simulate_schedule(
    order: Sequence[Sequence[PipelineAction]], costs: Sequence[float]
) -> list[list[TimedAction]]:
    """When each action runs where communication takes no time, by pipeline rank; raises Deadlock.

    The forward of a stage lasts its cost, a backward twice that, and each half of one as long as
    a forward. The first stage has nobody to send a gradient to, so there torch leaves the whole
    backward to its weight half.
    """
    ends: dict[PipelineAction, float] = {}
    done: list[list[TimedAction]] = [[] for _ in order]
    last = len(costs) - 1
    moved = True
    while moved:
        moved = False
        for actions, mine in zip(order, done, strict=True):
            while len(mine) < len(actions):
                action = actions[len(mine)]
                needed = _needed(action, last, ends)
                if any(one not in ends for one in needed):
                    break
                free = mine[-1].end if mine else 0.0
                start = max([free, *(ends[one] for one in needed)])
                ends[action] = start + _length(action, costs[action.stage])
                mine.append(TimedAction(action, start, ends[action]))
                moved = True
    waiting = [a[len(d)] for a, d in zip(order, done, strict=True) if len(d) < len(a)]
    if waiting:
        raise ScheduleDeadlock(f"{' and '.join(map(format_action, waiting))} wait for each other")
    return done


def _needed(
    action: PipelineAction, last: int, ends: dict[PipelineAction, float]
) -> list[PipelineAction]:
    kind, stage, microbatch = action
    if kind == "forward":
        return [PipelineAction("forward", stage - 1, microbatch)] if stage else []
    if kind == "weight":
        return [PipelineAction("input", stage, microbatch)]
    needed = [PipelineAction("forward", stage, microbatch)]
    if stage < last:  # the gradient comes from whichever kind of backward the next stage has
        halves = PipelineAction("input", stage + 1, microbatch)
        needed.append(
            halves if halves in ends else PipelineAction("backward", stage + 1, microbatch)
        )
    return needed


def _length(action: PipelineAction, cost: float) -> float:
    if action.kind == "backward":
        return 2 * cost
    if action.stage == 0 and action.kind != "forward":
        return 2 * cost if action.kind == "weight" else 0.0
    return cost


def action_name(activity: str, kind: str, stage: int, microbatch: int) -> str:
    """What an action is called in a trace; `activity` is pipeline where something is learned."""
    return f"{activity} {kind} {stage} {microbatch}"
