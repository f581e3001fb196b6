"""Simulation of a pipeline schedule: when each action starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from titanlite.parallelize.schedule import PipelineAction, iterate_runnable


class TimedAction(NamedTuple):
    """An action with its start and end time."""

    action: PipelineAction
    start: float
    end: float


def simulate_schedule(
    order: Sequence[Sequence[PipelineAction]], costs: Sequence[float]
) -> list[list[TimedAction]]:
    """Start and end of each action, by pipeline rank, if communication takes no time.

    `costs` has the duration of each stage's forward. A backward takes twice as long; its input and
    weight gradients take as long as the forward each. The first stage sends no input gradients, so
    torch computes its entire backward with the weight gradients. An order that would deadlock ends
    with the last action that can start.
    """
    ends: dict[PipelineAction, float] = {}
    rows: list[list[TimedAction]] = [[] for _ in order]
    for rank, action, dependencies in iterate_runnable(order):
        free_at = rows[rank][-1].end if rows[rank] else 0.0
        start = max([free_at, *(ends[dependency] for dependency in dependencies)])
        ends[action] = start + _duration(action, costs[action.stage])
        rows[rank].append(TimedAction(action, start, ends[action]))
    return rows


def _duration(action: PipelineAction, cost: float) -> float:
    if action.kind == "backward":
        return 2 * cost
    if action.stage == 0 and action.kind != "forward":
        return 2 * cost if action.kind == "weight" else 0.0
    return cost


def with_whole_backwards(order: Sequence[Sequence[PipelineAction]]) -> list[list[PipelineAction]]:
    """The order if the weight gradients are computed together with the input gradients."""
    return [
        [
            action._replace(kind="backward") if action.kind == "input" else action
            for action in actions
            if action.kind != "weight"
        ]
        for actions in order
    ]
