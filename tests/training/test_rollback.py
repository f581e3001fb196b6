"""The policy of roll-back: windows, tries, and the checkpoint to go back to."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from titanlite.data import PositionWindow
from titanlite.errors import CheckpointError
from titanlite.guard.policy import GuardConfig
from titanlite.guard.rollback import (
    RollbackHistory,
    SavedRollbacks,
    Trouble,
    steps_to_roll_back_to,
)
from titanlite.job.start import restore_progress
from titanlite.meters.expert_load import ExpertLoad
from titanlite.models.qwen3_moe import QWEN3_MOE, Qwen3MoESizes
from titanlite.models.router import NO_BALANCING, find_routers
from titanlite.optim import OptimizerSet
from titanlite.training.state import Counters, TrainState

BATCH = 8
SKIP = GuardConfig(rollback_steps=10)
LOWER = GuardConfig(rollback_steps=10, rollback_lr_factor=0.5)


def trouble_at(position: int) -> Trouble:
    return Trouble(position // BATCH + 1, position, BATCH, "loss 9 above 3")


def tried(history: RollbackHistory, position: int, policy=SKIP) -> RollbackHistory:
    following = history.next_try(trouble_at(position), policy)
    assert following is not None
    return following


def windows(*bounds, factor=0.0) -> tuple[PositionWindow, ...]:
    return tuple(PositionWindow(start, end, factor) for start, end in bounds)


def test_the_window_grows_on_both_sides_of_one_trouble_until_all_tries_have_failed():
    history = tried(RollbackHistory(), 800)
    assert history.windows == windows((720, 888))
    history = tried(history, 888)  # the first step after the window is bad as well
    assert history.windows == windows((640, 888 + 8 + 160))
    history = tried(history, 1056)
    assert history.windows == windows((480, 1056 + 8 + 320))
    assert history.next_try(trouble_at(1384), SKIP) is None
    assert [attempt.number for attempt in history.tries] == [1, 2, 3]


def test_a_lowered_learning_rate_is_lowered_again_by_each_try():
    history = tried(RollbackHistory(), 800, LOWER)
    assert history.windows == windows((720, 888), factor=0.5)
    assert tried(history, 800, LOWER).windows == windows((640, 968), factor=0.25)


def test_a_trouble_before_the_window_is_in_the_next_one_with_the_first_trouble():
    assert tried(tried(RollbackHistory(), 800), 400).windows == windows((240, 968))


def test_a_trouble_far_behind_the_window_is_a_new_one_and_the_old_window_stays():
    history = tried(tried(RollbackHistory(), 800), 888)
    first = history.windows
    last_of_the_same = 2 * 1056 - 640 - 1
    assert tried(history, last_of_the_same).tries[-1].number == 3
    history = tried(history, last_of_the_same + 1)
    assert history.tries[-1].number == 1
    assert history.windows == (*first, *windows((1472 - 80, 1472 + 8 + 80)))


@pytest.mark.parametrize("policy", [SKIP, LOWER], ids=["skip", "lower"])
def test_the_history_is_the_same_after_it_was_saved_as_json(policy):
    history = tried(tried(RollbackHistory(), 800, policy), 2000, policy)
    saved, restored = SavedRollbacks(Counters()), SavedRollbacks(counters := Counters())
    saved.record(history)
    restored.restore(json.loads(json.dumps(saved.state())))
    assert restored.history == history and counters.windows == history.windows
    restored.restore(None)
    assert restored.state() is None and counters.windows == ()


def test_the_newest_checkpoint_from_before_the_window_is_preferred():
    attempt = tried(RollbackHistory(), 800).tries[-1]
    positions = {20: 160, 90: 720, 60: 480, 91: 728, 95: 760, 100: 800, 101: 808}
    steps = steps_to_roll_back_to(positions, attempt, attempt.trouble, interval=10)
    # then the oldest of the interval from before the trouble
    assert steps == [90, 60, 20, 100]


def test_the_window_does_not_begin_before_the_first_sample():
    assert tried(RollbackHistory(), 16).windows == windows((0, 104))


def test_what_was_consumed_and_left_out_is_the_same_after_it_was_saved():
    counters = Counters(windows=tried(tried(RollbackHistory(), 800), 2000).windows)
    while counters.position < 3000:
        counters.advance(BATCH, BATCH)
    gaps = ((720, 888), (1920, 2088))
    assert (counters.gaps, counters.position - counters.samples) == (gaps, 336)
    assert counters.consumed == [(0, 720), (888, 1920), (2088, counters.position)]
    restored = Counters(windows=counters.windows)
    restored.restore(json.loads(json.dumps(counters.progress())))
    assert restored == counters


TRY = asdict(tried(RollbackHistory(), 320).tries[0])
NAN_FACTOR = {**TRY["window"], "lr_factor": float("nan")}
CRAFTED = (
    "abc",
    [{}],
    [{**TRY, "number": 10**9}],
    [{**TRY, "trouble": 3}],
    [{**TRY, "window": {"start": "0", "end": "9"}}],
    [{**TRY, "window": {"start": -8, "end": 9}}],
    [{**TRY, "window": {"start": 304, "end": 10**30}}],
    [{**TRY, "window": NAN_FACTOR}],
)


@pytest.mark.parametrize("crafted", CRAFTED, ids=lambda value: str(value)[-60:])
def test_crafted_progress_is_refused_without_a_traceback(crafted):
    counters, found = Counters(), SimpleNamespace(folder="step-3")
    parts = {"rollbacks": SavedRollbacks(counters)}
    state = TrainState(torch.nn.Linear(1, 1), OptimizerSet([], 1.0), None, counters, parts)
    progress = {**state.progress(), "rollbacks": [TRY]}
    restore_progress(state, progress, found)
    with pytest.raises(CheckpointError, match="step-3: its progress is not valid"):
        restore_progress(state, {**progress, "rollbacks": crafted}, found)


CRAFTED_GAPS = (
    {"gaps": [[20, 28]]},  # past the position
    {"gaps": [[8, 12], [0, 4]]},
    {"gaps": [[0, 8.0]]},
    {"gaps": [["0", "8"]]},
    {"gaps": 3},
)


@pytest.mark.parametrize("crafted", CRAFTED_GAPS, ids=str)
def test_crafted_gaps_are_refused_without_a_traceback(crafted):
    state, found = SimpleNamespace(restore=Counters().restore), SimpleNamespace(folder="step-3")
    progress = {"step": 3, "position": 24, "tokens": 0}
    restore_progress(state, {**progress, "gaps": [[8, 16]]}, found)
    with pytest.raises(CheckpointError, match="step-3: its progress is not valid"):
        restore_progress(state, {**progress, **crafted}, found)


CRAFTED_LOADS = {
    "no block 1": {"0": [0.25] * 4},
    "one load": {"0": [0.25] * 4, "1": [1.0]},
}


@pytest.mark.parametrize("crafted", CRAFTED_LOADS.values(), ids=CRAFTED_LOADS)
def test_crafted_loads_of_experts_are_refused_without_a_traceback(crafted):
    sizes = Qwen3MoESizes(16, 2, 2, 1, 8, n_experts=4, n_active_experts=2, vocab_size=8)
    model = QWEN3_MOE.build(sizes)
    load = ExpertLoad(model, QWEN3_MOE, sizes, NO_BALANCING, mesh=None)
    load.restore({"0": [0.25] * 4, "1": [0.1, 0.2, 0.3, 0.4]})
    assert find_routers(model)[1].previous_load.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    state = SimpleNamespace(restore=load.restore)
    with pytest.raises(
        CheckpointError, match="progress is not valid.*block 1: . loads for 4 experts"
    ):
        restore_progress(state, crafted, SimpleNamespace(folder="step-3"))
