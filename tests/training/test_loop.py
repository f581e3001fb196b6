"""The training loop when a step is abandoned, which is the last thing that it does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from titanlite.checkpoint import SaveRequest
from titanlite.errors import CheckpointError
from titanlite.metrics import MetricSinks
from titanlite.training.loop import _Loop
from titanlite.training.periodic import StepInfo, report_finished_save, save_checkpoints
from titanlite.training.run import Run


class FailingSave:
    """A checkpointer whose save of `step` is in flight and fails, and whose later saves work."""

    blocking, failures = False, 1

    def __init__(self, step: int, later_problem: str):
        self.last_step, self.in_flight, self.later_problem = (
            step,
            (step, "disk full"),
            later_problem,
        )
        self.saved: list[tuple[int, bool]] = []

    def due(self, step: int, ends_run: bool) -> bool:
        return ends_run and step != self.last_step

    def wait(self):
        if self.in_flight is None:
            return None
        (step, problem), self.in_flight = self.in_flight, None
        self.last_step = -1 if problem else step
        return SimpleNamespace(
            step=step, folder=f"step-{step}", seconds=1.0, blocked_seconds=1.0, problem=problem
        )

    def save(self, request: SaveRequest, final: bool) -> None:
        self.last_step, self.in_flight = request.step, (request.step, self.later_problem)
        self.saved.append((request.step, final))


def abandoned_after_step_2(checkpointer: FailingSave) -> _Loop:
    """A loop whose step 3 is abandoned; the last step that it knows was undone by the guard."""
    state = SimpleNamespace(
        step=2, model=nn.Linear(1, 1), optimizer=SimpleNamespace(zero_grad=lambda: None), parts={}
    )
    state.progress = dict
    sinks = MetricSinks()
    run = SimpleNamespace(
        state=state,
        sinks=sinks,
        checkpointer=checkpointer,
        watchdog=SimpleNamespace(set_phase=lambda step, phase: None),
        guard=SimpleNamespace(has_rejected=lambda: False, check_parameters=lambda *step: False),
        actions=(
            report_finished_save(checkpointer, sinks),
            save_checkpoints(state, checkpointer, sinks),
        ),
    )
    run.finish_save = lambda step: Run.finish_save(run, step)
    loop = object.__new__(_Loop)
    loop.run, loop.agreement = run, SimpleNamespace(reason=15)
    loop.last = StepInfo(3, None, False, is_last=True, stop_reason=0, is_saving=False)
    return loop


def test_the_step_before_an_abandoned_one_is_saved_again_if_its_save_fails():
    checkpointer = FailingSave(2, later_problem="")
    abandoned_after_step_2(checkpointer)._save_before_step()
    assert checkpointer.saved == [(2, False)]  # not as the final one


def test_a_second_failure_is_an_error():
    loop = abandoned_after_step_2(FailingSave(2, later_problem="disk full"))
    with pytest.raises(CheckpointError, match="disk full"):
        loop._save_before_step()


def test_an_abandoned_step_spoils_no_replay_of_the_step_before():
    checkpointer = FailingSave(1, later_problem="")
    loop = abandoned_after_step_2(checkpointer)
    # Its micro-batches left sums of gradients, to which a replay would add.
    loop.run.guard.has_rejected, loop.run.guard.settle = lambda: True, pytest.fail
    loop._save_before_step()
    assert checkpointer.saved == [] and checkpointer.in_flight is None
