"""States of a pipeline schedule: what a rank has in flight at each of its actions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import ge, le
from typing import Literal, NamedTuple

from titanlite.parallelize.schedule import (
    SCHEDULES,
    PipelineAction,
    build_schedule_order,
)
from titanlite_planner.stages import owned_stages, simulated_microbatches, stages_in_flight
from titanlite_planner.workload import ScheduleActions

Kind = Literal["forward", "backward", "input", "weight", "reduce"]
# "reduce": of the gradients of a stage, after its last backward


class ScheduleState(NamedTuple):
    """An action of a rank, and what came before it; stages are those of the rank, in order."""

    kind: Kind
    stage: int
    in_flight: tuple[int, ...]
    # forwards of each stage without weight gradients; those of this action included
    accumulated: tuple[bool, ...]  # whether each stage has weight gradients that are not reduced
    waiting: tuple[int, ...] = ()  # of those in flight, the ones with input gradients; (): none
    reduced: tuple[bool, ...] = ()  # whether each stage has had its last backward; (): none has


def schedule_states(
    schedule: str,
    owners: tuple[int, ...],
    microbatches: int,
    actions: ScheduleActions = (),
    splits_backward: bool = True,
) -> tuple[tuple[ScheduleState, ...], ...]:
    """The states of each rank that can be its peak.

    No other state of the same kind has more in flight, and gradients of more stages.
    `actions`: of a schedule from a file. `splits_backward`: as in Workload. A schedule that is not
    known, or does not suit the number of micro-batches, has one backward of each stage, with as
    many forwards in flight as there are at the most.
    """
    if actions:
        return _listed_states(actions, owners, splits_backward)
    ranks = max(owners) + 1
    if schedule in ("GPipe", "LoopedBFS"):
        return (_forwards_first(len(owners) // ranks, microbatches),) * ranks
    count = simulated_microbatches(ranks, microbatches)
    known = _ordered_states(schedule, owners, count, splits_backward)
    return known or _assumed_states(schedule, owners, microbatches)


@lru_cache(8192)
def _forwards_first(stages: int, microbatches: int) -> tuple[ScheduleState, ...]:
    """The states of a rank that runs all micro-batches through a stage before the next one.

    Backwards begin with its last stage, after the forwards of all stages.
    """
    states = []
    for stage in range(stages):
        after = stages - stage - 1
        full = (*[microbatches] * (stage + 1), *[0] * after)
        less = (*[microbatches] * stage, microbatches - 1, *[0] * after)
        none, waiting = (False,) * stages, (0,) * stages
        states.append(ScheduleState("forward", stage, less, none, waiting, none))
        reduced = (*[False] * (stage + 1), *[True] * after)
        states.append(ScheduleState("backward", stage, full, none, waiting, reduced))
        own = tuple(other == stage for other in range(stages))
        if microbatches > 1:
            states.append(ScheduleState("backward", stage, less, own, waiting, reduced))
        before = (*[microbatches] * stage, *[0] * (after + 1))
        states.append(ScheduleState("reduce", stage, before, own, waiting, reduced))
    return tuple(states)


@lru_cache(8192)  # a search asks for thousands, many of them again
def _ordered_states(
    schedule: str, owners: tuple[int, ...], microbatches: int, splits_backward: bool
) -> tuple[tuple[ScheduleState, ...], ...]:
    """The states by the order of the schedule; empty if it has none."""
    ranks = max(owners) + 1
    if schedule not in SCHEDULES:
        return ()
    try:
        orders = build_schedule_order(schedule, ranks, len(owners), microbatches)
    except ValueError:
        return ()
    return _states_of_ranks(orders, owners, splits_backward)


@lru_cache(256)
def _listed_states(
    actions: ScheduleActions, owners: tuple[int, ...], splits_backward: bool
) -> tuple[tuple[ScheduleState, ...], ...]:
    return _states_of_ranks(actions, owners, splits_backward)


def _states_of_ranks(
    orders: Sequence[Sequence[PipelineAction]], owners: tuple[int, ...], splits_backward: bool
) -> tuple[tuple[ScheduleState, ...], ...]:
    return tuple(
        _states(order, owned_stages(owners, rank), splits_backward)
        for rank, order in enumerate(orders)
    )


@lru_cache(8192)
def _assumed_states(
    schedule: str, owners: tuple[int, ...], microbatches: int
) -> tuple[tuple[ScheduleState, ...], ...]:
    most = stages_in_flight(schedule, owners, microbatches)
    return tuple(_assumed(counts, microbatches) for counts in most)


def _assumed(counts: dict[int, int], microbatches: int) -> tuple[ScheduleState, ...]:
    full = tuple(counts.values())
    states = []
    for stage in range(len(full)):
        less = tuple(max(0, count - (other == stage)) for other, count in enumerate(full))
        before = (False, True) if microbatches > max(full) else (False,)
        for done in before:
            states.append(ScheduleState("forward", stage, less, (done,) * len(full)))
            states.append(ScheduleState("backward", stage, full, (done,) * len(full)))
        later = (True,) * len(full)
        if microbatches > 1:
            states.append(ScheduleState("backward", stage, less, later))
    return tuple(states)


def _states(
    actions: Sequence[PipelineAction], own: list[int], splits_backward: bool
) -> tuple[ScheduleState, ...]:
    position = {stage: index for index, stage in enumerate(own)}
    alive, waiting, done = [0] * len(own), [0] * len(own), [False] * len(own)
    reduced = [False] * len(own)
    left = Counter(action.stage for action in actions if action.kind in ("backward", "weight"))
    states: dict[ScheduleState, None] = {}  # a set, in the order of the schedule
    for action in actions:
        if action.kind not in ("forward", "backward", "input", "weight"):
            continue
        stage, kind = position[action.stage], _kind_of(action, splits_backward)
        if action.kind in ("backward", "weight"):
            left[action.stage] -= 1
        counts = (alive, done, waiting, reduced)
        if kind is not None:
            states[ScheduleState(kind, stage, *map(tuple, counts))] = None  # type: ignore[arg-type]
        if kind == "forward":
            alive[stage] += 1
        elif kind == "input":
            waiting[stage] += 1
        elif kind is not None:
            alive[stage] -= 1
            waiting[stage] -= kind == "weight"
            done[stage] = True
        if not left[action.stage] and action.kind in ("backward", "weight"):
            reduction = ScheduleState("reduce", stage, *map(tuple, counts))  # type: ignore[arg-type]
            states[reduction] = None
            done[stage], reduced[stage] = False, True
    kept = _largest(states)
    return tuple(state for state in states if state in kept)


def _kind_of(action: PipelineAction, splits_backward: bool) -> Kind | None:
    """What an action computes; None: nothing.

    A backward that is not split is computed with the input gradients. The first stage sends none,
    so torch computes its split backward with the weight gradients.
    """
    kind: Kind = action.kind
    if kind in ("forward", "backward") or (splits_backward and action.stage):
        return kind
    whole = "weight" if splits_backward else "input"
    return "backward" if kind == whole else None


def _largest(states: Iterable[ScheduleState]) -> set[ScheduleState]:
    """Those than which no other of their kind has more in flight, and more stages with gradients.

    A kind is the action, its stage, and whether that has gradients.
    """
    kept: dict[tuple[str, int, bool], list[ScheduleState]] = defaultdict(list)
    for state in sorted(states, key=_total_in_state, reverse=True):
        others = kept[state.kind, state.stage, state.accumulated[state.stage]]
        if not any(_covers(other, state) for other in others):
            others.append(state)
    return {state for same in kept.values() for state in same}


def _total_in_state(state: ScheduleState) -> int:
    return sum(state.in_flight) + sum(state.accumulated) + sum(state.waiting)


def _covers(more: ScheduleState, less: ScheduleState) -> bool:
    """Whether `more` has in flight what `less` has, gradients where it has them, and parameters."""
    return (
        all(map(ge, more.in_flight, less.in_flight))
        and all(map(ge, more.accumulated, less.accumulated))
        and all(map(ge, more.waiting, less.waiting))
        and all(map(le, more.reduced, less.reduced))
    )
