"""A run that is asked to stop saves and leaves, and the same command goes on from there."""

from __future__ import annotations

import signal
import time

import pytest
from tests.faults.launch import Launched, events_of, steps_of

LONG = ("--training.steps", "2000", "--checkpoint.interval", "1000", "--validation.enable", "false")


def argv_of(run_toml, *argv) -> tuple[str, ...]:
    return ("--job.config_file", str(run_toml), *argv)


@pytest.mark.parametrize(
    "number, rank, ranks", [(signal.SIGTERM, 2, 4), (signal.SIGUSR1, 1, 2), (signal.SIGUSR2, 0, 1)]
)
def test_a_signal_to_any_one_rank_saves_the_run_and_ends_all_of_it(
    number, rank, ranks, run_toml, tmp_path
):
    out = tmp_path / "out"
    with Launched(ranks, out, *argv_of(run_toml, *LONG)) as run:
        run.wait_for(lambda: len(steps_of(out)) > 3)
        seen = max(steps_of(out))
        run.signal(rank, number)
        assert run.wait() == [75] * ranks, run.said
    last = max(steps_of(out))
    # the step that runs when the signal comes, and one more that may have begun to ask
    assert last - seen <= 4
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [last]
    assert [(e["step"], e["reason"]) for e in events_of(out, "stopped")] == [(last, number.name)]
    if number == signal.SIGTERM:
        steps = ("--training.steps", str(last + 2))
        with Launched(2, out, *argv_of(run_toml, *steps, "--lr_scheduler.total_steps", "2000")) as run:
            assert run.wait() == [0, 0], run.said
        assert steps_of(out) == list(range(1, last + 3))
        assert [e["step"] for e in events_of(out, "resumed")] == [last]


def test_a_run_leaves_before_its_time_is_up(run_toml, tmp_path):
    out, began = tmp_path / "out", time.monotonic()
    with Launched(2, out, *argv_of(run_toml, *LONG, "--job.time_limit_minutes", "0.08")) as run:
        assert run.wait() == [75] * 2, run.said
    assert time.monotonic() - began < 8
    last = max(steps_of(out))
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [last]
    assert events_of(out, "stopped")[0]["reason"] == "time_limit"
