"""A run that meets a poisoned stretch of data rolls back, skips it, and ends as a clean run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from conftest import write_corpus
from tests.faults.launch import LaunchedRun, events_of, lines_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.checkpoint.manifest import write_checkpoint_manifest
from titanlite.storage import StorageFolder
from titanlite_lab.drill.injector import NumericalFault, injected

STEPS, BATCH = 60, 8
POISON = NumericalFault("data", start=40 * BATCH, end=46 * BATCH)  # steps 41 to 46
SETTINGS = {
    "job.max_crashes": 0,
    "training.steps": STEPS,
    "training.local_batch_size": BATCH,  # one micro-batch on one rank
    "lr_scheduler.total_steps": STEPS,
    "optimizer.lr": 3e-3,
    "validation.enable": "false",
    "checkpoint.interval": 4,
    "checkpoint.keep_latest_k": 5,
    "checkpoint.async_mode": "async",
    "guard.spike": "rollback",
    "guard.window_steps": 16,
    "guard.threshold": 8,
    "guard.rollback_steps": 2,
    "comm.train_timeout_seconds": 10,
    "metrics.noise_scale_freq": 37,  # the first step after the roll-back
}
VALIDATE = ("--validation.enable", "true", "--validation.freq", str(STEPS))
VALIDATE += ("--validation.steps", "-1")
SECONDS = 180  # for one run, which takes about five on an idle machine


def launch(
    run_toml, out: Path, *argv, prepare: Callable[[], None] | None = None, ranks: int = 1
) -> LaunchedRun:
    options = [text for key, value in SETTINGS.items() for text in (f"--{key}", str(value))]
    argv = ("--job.config_file", str(run_toml), "--job.dump_folder", str(out), *options, *argv)
    return LaunchedRun(ranks, out, *argv, prepare=prepare)


_injections = ExitStack()  # of a forked process, until it ends


def inject(fault: NumericalFault) -> None:
    _injections.enter_context(injected(fault, int(os.environ["RANK"])))


def manifest_of(out: Path, step: int = STEPS):
    return read_checkpoint_manifest(StorageFolder(out / "checkpoint" / f"step-{step}"))


def final_state(out: Path) -> tuple:
    manifest = manifest_of(out)
    return manifest.tensors, manifest.progress


def last_validation(out: Path) -> float:
    return events_of(out, "validation")[-1]["loss"]


def losses_of(out: Path) -> list[float]:
    return [line["loss"] for line in lines_of(out) if "event" not in line]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Text that does not change with this repository, for a loss without a spike of its own."""
    draw = random.Random(0)
    names = ["model", "layer", "weights", "loss", "step", "batch", "rank", "mesh", "state"]

    def text(lines: int) -> str:
        words = ([*draw.choices(names, k=3), draw.randrange(100)] for _ in range(lines))
        return "".join(f"{a} = {b}.{c}({number})\n" for a, b, c, number in words)

    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "train", [text(50) for _ in range(100)])
    write_corpus(folder / "validation", [text(50)])
    return folder


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory) -> dict:
    """The output of the run with the poisoned stretch, on one rank; filled by the first test."""
    return {"folder": tmp_path_factory.mktemp("poisoned") / "out"}


@pytest.fixture
def rolled_back(poisoned, run_toml) -> Path:
    """The run with the poisoned stretch of data, on one rank."""
    out = poisoned["folder"]
    if not out.exists():
        argv = (*VALIDATE, "--metrics.enable_tensorboard", "true")
        with launch(run_toml, out, *argv, prepare=partial(inject, POISON)) as run:
            assert run.wait(SECONDS) == [0], run.output
    return out


def test_a_poisoned_stretch_is_passed_over_and_the_run_ends_as_well_as_a_clean_one(
    rolled_back, run_toml, tmp_path
):
    with launch(run_toml, tmp_path / "clean", *VALIDATE) as clean:
        assert clean.wait(SECONDS) == [0], clean.output
    assert events_of(tmp_path / "clean", "rolled_back") == []
    assert last_validation(rolled_back) == pytest.approx(
        last_validation(tmp_path / "clean"), rel=5e-3
    )
    events = events_of(rolled_back, "rolled_back")
    assert [(e["number"], e["attempt"], e["step"], e["from_step"]) for e in events] == [
        (1, 1, 36, 41),
        (2, 2, 36, 39),
    ]
    assert (events[1]["first_sample"], events[1]["last_sample"]) == (36 * BATCH, 48 * BATCH - 1)
    assert "spike, loss" in events[1]["reason"] and events[1]["path"].endswith("step-36")
    lines = [line for line in lines_of(rolled_back) if "event" not in line]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["samples"] for line in lines] == [BATCH * step for step in range(1, STEPS + 1)]
    progress = manifest_of(rolled_back).progress
    left_out = sum(end - first for first, end in progress["gaps"])
    assert (progress["position"], left_out) == (72 * BATCH, 12 * BATCH)
    starts = [json.loads(line) for line in (rolled_back / "starts.jsonl").read_text().splitlines()]
    recorded = [(e["step"], e["to_step"]) for e in starts if e["event"] == "rollback"]
    assert recorded == [(41, 36), (39, 36)]
    assert (rolled_back / "checkpoint" / "step-40.aside-1" / "manifest.json").exists()


def test_tensorboard_shows_one_curve_with_the_roll_backs(rolled_back):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(rolled_back / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    shown = [(e.step, e.value) for e in events.Scalars("rollback/from_step")]
    assert shown == [(36, 41.0), (36, 39.0)]


def test_a_roll_back_ends_in_the_bits_of_a_new_process_with_the_same_windows(
    rolled_back, run_toml, tmp_path
):
    """The running process must keep nothing of the steps that it takes back."""
    out, history = tmp_path / "fresh", manifest_of(rolled_back).progress["rollbacks"]
    options = ("--training.steps", "36", "--lr_scheduler.total_steps", str(STEPS))
    with launch(run_toml, out, *options) as run:
        assert run.wait(SECONDS) == [0], run.output
    manifest = manifest_of(out, 36)
    progress = {**manifest.progress, "skipped": 0, "rollbacks": history}
    write_checkpoint_manifest(
        StorageFolder(out / "checkpoint" / "step-36"), replace(manifest, progress=progress)
    )
    with launch(run_toml, out, prepare=partial(inject, POISON)) as run:
        assert run.wait(SECONDS) == [0], run.output
    assert len(events_of(out, "resumed")) == 1 and events_of(out, "spike") == []
    assert final_state(out) == final_state(rolled_back)


def test_a_roll_back_is_the_same_under_another_layout(rolled_back, run_toml, tmp_path):
    argv = ("--training.local_batch_size", str(BATCH // 2))  # FSDP on two ranks
    with launch(run_toml, tmp_path / "out", *argv, prepare=partial(inject, POISON), ranks=2) as run:
        assert run.wait(SECONDS) == [0, 0], run.output
    assert losses_of(tmp_path / "out") == pytest.approx(losses_of(rolled_back), rel=1e-5)
    windows = [
        [attempt["window"] for attempt in manifest_of(folder).progress["rollbacks"]]
        for folder in (tmp_path / "out", rolled_back)
    ]
    assert windows[0] == windows[1]


# --- kills ---------------------------------------------------------------------------------------


def die(*args, **options) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(target: str, *, after: bool, in_call: int, fault: NumericalFault) -> None:
    """Kill this process before or after a call of the function `target`, since the roll-back."""
    from titanlite.guard.rollback import CheckpointRollback

    inject(fault)
    calls, roll_back = [-1], CheckpointRollback.roll_back  # -1: not rolled back yet

    def start(*args) -> None:
        calls[0] = max(0, calls[0])
        roll_back(*args)

    patcher = patch(target)
    original, _ = patcher.get_original()

    def call(*args, **options):
        calls[0] += calls[0] >= 0
        if calls[0] == in_call and not after:
            die()
        result = original(*args, **options)
        if calls[0] == in_call and after:
            die()
        return result

    _injections.enter_context(patch(target, call))
    _injections.enter_context(patch.object(CheckpointRollback, "roll_back", start))


CHECKPOINTER, JSONL = "titanlite.checkpoint.checkpointer", "titanlite.metrics.jsonl"
FOLDERS = "titanlite.checkpoint.step_folders"
MOMENTS = {
    "before it looks for a checkpoint": (f"{CHECKPOINTER}.find_first_valid", False, 1),
    "after the checkpoint is loaded": (f"{CHECKPOINTER}.read_tensors", True, 1),
    "after a later checkpoint is set aside": (f"{FOLDERS}.set_aside", True, 1),
    "while metrics.jsonl is rewritten": (f"{JSONL}.write_file_atomically", False, 1),
    "in the second try": (f"{CHECKPOINTER}.read_tensors", True, 2),
    "before the next save is committed": (f"{CHECKPOINTER}.write_checkpoint_manifest", False, 1),
    "after the next save is committed": (f"{CHECKPOINTER}.write_checkpoint_manifest", True, 1),
}  # fmt: skip


def test_a_kill_at_any_moment_of_a_roll_back_changes_nothing(rolled_back, run_toml, tmp_path):
    out = tmp_path / "killed"
    for moment, (target, after, in_call) in MOMENTS.items():
        dying = partial(die_at, target, after=after, in_call=in_call, fault=POISON)
        with launch(run_toml, out, prepare=dying) as run:
            assert run.wait(SECONDS) == [-signal.SIGKILL], f"{moment}: {run.output}"
    with launch(run_toml, out, prepare=partial(inject, POISON)) as run:
        assert run.wait(SECONDS) == [0], run.output
    assert final_state(out) == final_state(rolled_back)
    assert losses_of(out) == losses_of(rolled_back)
    numbers = [event["number"] for event in events_of(out, "rolled_back")]
    assert numbers == [1, 2], "each roll-back is recorded once"


# --- the end of the tries ------------------------------------------------------------------------


def test_when_all_tries_have_failed_the_run_ends_with_3_and_lists_them(run_toml, tmp_path):
    out, endless = tmp_path / "out", replace(POISON, end=10**9)
    with launch(run_toml, out, prepare=partial(inject, endless)) as run:
        assert run.wait(SECONDS) == [3], run.output
    assert "all 3 tries have failed" in run.output and "Traceback" not in run.output
    assert run.output.count("\n    try ") == 3, run.output
    (event,) = events_of(out, "rollback_failed")
    assert "all 3 tries have failed" in event["reason"]
    assert json.loads((out / "starts.jsonl").read_text().splitlines()[-1])["code"] == 3


def test_without_a_checkpoint_from_before_the_trouble_the_run_ends_with_3(run_toml, tmp_path):
    argv = ("--checkpoint.interval", "50", "--checkpoint.keep_latest_k", "0")
    with launch(run_toml, tmp_path / "out", *argv, prepare=partial(inject, POISON)) as run:
        assert run.wait(SECONDS) == [3], run.output
    assert "no valid checkpoint from before it" in run.output and "Traceback" not in run.output
    assert not (tmp_path / "out" / "checkpoint" / "step-50").exists()


def report_slowly(out: Path, fault: NumericalFault) -> None:
    """Let rank 0 take a second to rewrite metrics.jsonl; rank 1 must still be in phase load."""
    from titanlite.metrics import jsonl
    from titanlite.runtime import HeartbeatWatchdog

    inject(fault)
    rewrite, set_phase, marker = jsonl.drop_later_records, HeartbeatWatchdog.set_phase, out / "slow"

    def rewrite_slowly(*args) -> None:
        if args[1] == 36:
            marker.touch()
            time.sleep(1)
        rewrite(*args)
        marker.unlink(missing_ok=True)

    def check_phase(self, step: int, phase: str) -> None:
        assert not (os.environ["RANK"] == "1" and marker.exists()), f"step {step}, {phase}"
        set_phase(self, step, phase)

    _injections.enter_context(patch.object(jsonl, "drop_later_records", rewrite_slowly))
    _injections.enter_context(patch.object(HeartbeatWatchdog, "set_phase", check_phase))


def test_the_window_can_be_trained_through_with_a_lower_learning_rate(run_toml, tmp_path):
    """The fault is in two computations of the step, so that the replay finds the same bits."""
    out, fault = tmp_path / "out", NumericalFault("gradient", 1, 41, value="nan", times=2)
    argv = (
        *("--guard.nonfinite", "rollback", "--guard.rollback_lr_factor", "0.5"),
        *("--training.local_batch_size", "2"),  # two micro-batches on each rank
    )
    with launch(run_toml, out, *argv, prepare=partial(report_slowly, out, fault), ranks=2) as run:
        assert run.wait(SECONDS) == [0, 0], run.output
    (event,) = events_of(out, "rolled_back")
    assert (event["step"], event["from_step"], event["lr_factor"]) == (36, 41, 0.5)
    lines = [line for line in lines_of(out) if "event" not in line]
    assert [line["samples"] for line in lines] == [BATCH * step for step in range(1, STEPS + 1)]
    peak = SETTINGS["optimizer.lr"] / (STEPS - 2)  # decays linearly after two steps
    factors = [line["lr"] / (peak * (STEPS - line["step"] + 1)) for line in lines[36:46]]
    assert factors == pytest.approx([1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 1])
    assert manifest_of(out).progress["rollbacks"] and "gaps" not in manifest_of(out).progress


def test_a_roll_back_of_updates_in_backward_writes_the_batch(run_toml, tmp_path):
    out, fault = tmp_path / "out", NumericalFault("activation", 0, 8, value="nan", parameter="norm")
    argv = (
        "--training.steps", "9", "--optimizer.early_step_in_backward", "true",
        "--training.max_norm", "0", "--training.local_batch_size", "8", "--guard.spike", "off",
        "--guard.nonfinite", "rollback", "--metrics.noise_scale_freq", "0",
    )  # fmt: skip
    with launch(run_toml, out, *argv, prepare=partial(inject, fault)) as run:
        assert run.wait(SECONDS) == [0], run.output
    assert [event["from_step"] for event in events_of(out, "rolled_back")] == [8]
    assert (out / "guard" / "step-8.json").exists()
    assert "violation  inf or NaN" in run.output


def test_a_policy_without_checkpoints_to_roll_back_to_is_refused(run_toml, tmp_path):
    from titanlite.errors import UserError
    from titanlite.job import read_job

    argv = ["--job.config_file", str(run_toml), "--guard.spike", "rollback"]
    with pytest.raises(UserError, match="checkpoint.enable = false, so there would be nothing"):
        read_job([*argv, "--checkpoint.enable", "false"], 1)
    with pytest.raises(UserError, match="keep_latest_k = 268 or more"):
        read_job([*argv, "--checkpoint.keep_latest_k", "2"], 1)
    with pytest.raises(UserError, match="max_violations = 1: the run would end at the first"):
        read_job([*argv, "--guard.max_violations", "1"], 1)
