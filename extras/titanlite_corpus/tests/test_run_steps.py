"""What a step of a run saw is found exactly, from what the run recorded."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from titanlite.errors import DataError
from titanlite.guard.policy import GuardConfig
from titanlite.guard.rollback import RollbackHistory, Trouble
from titanlite.job import JobConfig
from titanlite.training.batch_schedule import build_batch_schedule
from titanlite.training.state import Counters
from titanlite_corpus.inspection.run_steps import read_progress

SEQ_LEN = 10


class SimulatedRun:
    """Counts as a run does, and writes its records; keeps what each step really consumed."""

    def __init__(self, folder: Path, batch: int, ramp: str | None = None, log_freq: int = 3):
        self.folder, self.log_freq = folder, log_freq
        self.counters, self.records, self.saved = Counters(), [], {0: Counters()}
        self.truth: dict[int, tuple[int, int]] = {}
        self.history = RollbackHistory()
        self.configure(batch, ramp)

    def configure(self, batch: int, ramp: str | None = None) -> None:
        config = JobConfig()
        training = dataclasses.replace(
            config.training, seq_len=SEQ_LEN, global_batch_size=batch, batch_size_ramp=ramp
        )
        self.config = dataclasses.replace(config, training=training)
        self.schedule = build_batch_schedule(training, batch)

    def train(self, to: int) -> None:
        counters = self.counters
        while counters.step < to:
            samples = self.schedule.batch_at(counters.tokens)
            self.truth[counters.step + 1] = (counters.next_start(samples), samples)
            counters.advance(samples, samples * SEQ_LEN)
            if counters.step % self.log_freq == 0 or counters.step == to:
                self.records.append({"step": counters.step, "samples": counters.samples})
            self.saved[counters.step] = copy.deepcopy(counters), self.history

    def resume(self, step: int) -> None:
        """Start again from the checkpoint of a step."""
        self._go_back(step)
        event = {"event": "resumed", "step": step, "position": self.counters.position}
        self.records.append(event)

    def roll_back(self, step: int, config: GuardConfig) -> None:
        """Take the last step as trouble, and go back to the checkpoint of `step`."""
        latest = self.counters.step
        trouble = Trouble(latest, *self.truth[latest], "spike")
        history = self.history
        following = history.next_try(trouble, config)
        self._go_back(step)
        self.history = following
        self.counters.set_windows(self.history.windows)
        attempt = following.tries[-1]
        window = attempt.window
        event = {"event": "rolled_back", "step": step, "from_step": latest}
        event |= {"number": len(history.tries) + 1, "attempt": attempt.number}
        event |= {"first_sample": window.start, "last_sample": window.end - 1}
        self.records.append({**event, "lr_factor": window.lr_factor})

    def _go_back(self, step: int) -> None:
        counters, self.history = self.saved[step]
        self.counters = copy.deepcopy(counters)
        rolled = "rolled_back"
        self.records = [r for r in self.records if r["step"] <= step or r.get("event") == rolled]
        self.truth = {s: batch for s, batch in self.truth.items() if s <= step}

    def check(self) -> None:
        """Compare every step with the truth."""
        lines = [json.dumps(record) + "\n" for record in self.records]
        (self.folder / "metrics.jsonl").write_text("".join(lines))
        progress = read_progress(self.folder, self.config)
        found = {step: progress.batch_of(step) for step in self.truth}
        assert {s: (b.position, b.samples) for s, b in found.items()} == self.truth


def test_a_batch_ramp_is_followed(tmp_path):
    run = SimulatedRun(tmp_path, 8, ramp="0:2 100:4 400:8")
    run.train(25)
    run.check()
    assert {samples for _, samples in run.truth.values()} == {2, 4, 8}


@pytest.mark.parametrize("lr_factor", [0.0, 0.5])
def test_positions_that_roll_backs_skip_are_left_out(tmp_path, lr_factor):
    config = GuardConfig(rollback_steps=2, rollback_lr_factor=lr_factor)
    run = SimulatedRun(tmp_path, 8, ramp="0:4 200:8")
    run.train(14)
    run.roll_back(8, config)
    run.train(13)
    run.roll_back(4, config)  # a second try for the same trouble, from an older checkpoint
    run.train(30)
    run.roll_back(24, config)  # another trouble
    run.train(40)
    run.check()
    assert (run.counters.samples < run.counters.position) == (lr_factor == 0)


def test_a_step_before_the_roll_back_keeps_positions_that_are_skipped_later(tmp_path):
    """The checkpoint may lie inside the window, if no older one is there."""
    run = SimulatedRun(tmp_path, 8)
    run.train(14)
    run.roll_back(8, GuardConfig(rollback_steps=8))
    window = run.counters.windows[0]
    assert window.start <= run.truth[8][0] < window.end
    run.train(20)
    run.check()


def test_a_batch_size_that_was_changed_on_resume_is_found(tmp_path):
    """config.toml has the last size only."""
    run = SimulatedRun(tmp_path, 6)
    run.train(8)
    run.resume(7)
    run.configure(9)
    run.train(20)
    run.resume(16)
    run.configure(4)
    run.train(31)
    run.check()
    run.configure(12)  # no size of the run: the records alone decide
    run.check()


def test_a_resumed_run_with_skipped_positions_is_followed(tmp_path):
    config = GuardConfig(rollback_steps=2)
    run = SimulatedRun(tmp_path, 4)
    run.train(12)
    run.roll_back(6, config)
    run.train(15)
    run.resume(12)
    run.configure(8)
    run.train(24)
    run.check()


def test_steps_that_are_not_known_are_refused(tmp_path):
    run = SimulatedRun(tmp_path, 6)
    run.train(9)
    run.check()
    progress = read_progress(tmp_path, run.config)
    for step in (0, 10):
        with pytest.raises(DataError, match=f"has taken 9 steps; there is no step {step}"):
            progress.batch_of(step)
    progress.samples[9] += 1  # steps 7 to 9 had no single size
    with pytest.raises(DataError, match="steps 7 to 9 had 19 samples"):
        progress.batch_of(8)
    progress.samples[9] -= 1
    progress.positions[9] = 60  # as after a start with the data position excluded
    with pytest.raises(DataError, match="end at position 54, not 60"):
        progress.batch_of(8)


def test_other_data_at_that_step_is_refused(tmp_path):
    progress = read_progress_of(SimulatedRun(tmp_path, 6))
    properties = {"data.sources": {"code": "a"}, "debug.seed": 1}
    progress.properties |= {4: {**properties, "debug.seed": 2}, 8: properties}
    progress.check_data(5, properties)
    with pytest.raises(DataError, match="the checkpoint of step 4 differs in debug.seed"):
        progress.check_data(3, properties)


def read_progress_of(run: SimulatedRun):
    run.train(9)
    run.check()
    return read_progress(run.folder, run.config)
