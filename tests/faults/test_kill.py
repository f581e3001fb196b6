"""A run that is killed at any moment and resumed ends in the state of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults.launch import LaunchedRun, events_of, lines_of, open_store, steps_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.storage import StorageFolder

STEPS = 24
ASYNC = (
    "--checkpoint.async_mode",
    "async",
    "--checkpoint.interval",
    "2",
    "--job.max_crashes",
    "0",
    "--comm.train_timeout_seconds",
    "10",  # short, so that a dead rank is detected soon
)
RAMP = (  # of the batch size; the learning rate is a function of the tokens, too
    *("--training.batch_size_ramp", "0:4 2K:8"),
    *("--lr_scheduler.warmup_steps", "none", "--lr_scheduler.warmup_tokens", "500"),
)


def argv_of(run_toml, out: Path, *argv) -> tuple[str, ...]:
    settings = {"training.steps": STEPS, "validation.enable": "false", "job.dump_folder": out}
    options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ("--job.config_file", str(run_toml), *options, *ASYNC, *argv)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def undisturbed(folder, run_toml) -> Path:
    """The output of a run that nothing disturbs; the first test trains it."""
    out = folder / "out"
    if not out.exists():
        with LaunchedRun(2, out, *argv_of(run_toml, out, *RAMP)) as run:
            assert run.wait() == [0, 0], run.output
    return out


def kill_until_done(run_toml, out: Path, kills: int, seed: int, layouts: list[tuple]) -> int:
    """Kill a random rank at a random moment, `kills` times; returns the number of starts.

    All starts use one rendezvous store, as under torchrun --max-restarts.
    """
    random_source, starts, store = random.Random(seed), 0, open_store()
    while True:
        ranks, *argv = layouts[starts % len(layouts)]
        starts += 1
        with LaunchedRun(ranks, out, *argv_of(run_toml, out, *RAMP, *argv), store=store) as run:
            if starts > kills:
                assert run.wait() == [0] * ranks, run.output
                return starts
            run.wait_for(partial(has_more_lines_or_ended, out, len(lines_of(out))))
            time.sleep(random_source.uniform(0, 0.4))
            run.signal(random_source.randrange(ranks), signal.SIGKILL)
            codes = run.wait()
            assert all(code in (-9, 1, 0) for code in codes), f"{codes}\n{run.output}"


def has_more_lines_or_ended(out: Path, lines: int) -> bool:
    return len(lines_of(out)) > lines or steps_of(out)[-1:] == [STEPS]


def final_state(out: Path) -> tuple:
    """Hashes of all weights and optimizer state, and the progress, of the last checkpoint."""
    manifest = read_checkpoint_manifest(StorageFolder(out / "checkpoint" / f"step-{STEPS}"))
    return manifest.tensors, manifest.progress


def test_a_run_killed_repeatedly_ends_bit_equal_to_an_undisturbed_run(
    undisturbed, run_toml, tmp_path
):
    kill_until_done(run_toml, tmp_path / "killed", 2, 1, [(2,)])
    assert final_state(tmp_path / "killed") == final_state(undisturbed)
    assert steps_of(tmp_path / "killed") == list(range(1, STEPS + 1))


def test_a_run_killed_and_resumed_under_other_layouts_has_the_same_losses(
    undisturbed, run_toml, tmp_path
):
    layouts = [
        (2,),
        (2, "--parallelism.tensor_parallel_degree", "2"),
        (2, "--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4"),
    ]
    kill_until_done(run_toml, tmp_path / "moved", 2, 2, layouts)
    curves = [
        {line["step"]: line["loss"] for line in lines_of(out) if "event" not in line}
        for out in (undisturbed, tmp_path / "moved")
    ]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    lines = [line for line in lines_of(tmp_path / "moved") if "event" not in line]
    samples = [4 * min(step, 11) + 8 * max(0, step - 11) for step in range(1, STEPS + 1)]
    assert [line["samples"] for line in lines] == samples


def test_a_job_that_keeps_crashing_is_stopped_with_the_reasons_of_the_crashes(run_toml, tmp_path):
    out, argv = tmp_path / "out", ("--checkpoint.interval", "1000", "--job.max_crashes", "2")
    for _ in range(2):
        with LaunchedRun(1, out, *argv_of(run_toml, out, *argv)) as run:
            run.wait_for(lambda: "step  1/24" in run.output)
            run.signal(0, signal.SIGKILL)
            run.wait()
    with LaunchedRun(1, out, *argv_of(run_toml, out, *argv)) as run:
        assert run.wait() == [2], run.output
        assert "the last 2 starts crashed" in run.output and "was killed" in run.output
        assert "Traceback" not in run.output and "--job.max_crashes 0" in run.output


def test_a_second_job_on_the_same_folder_is_refused_and_the_first_continues(run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(1, out, *argv_of(run_toml, out, "--training.steps", "3000")) as first:
        first.wait_for(lambda: steps_of(out))
        with LaunchedRun(1, out, *argv_of(run_toml, out)) as second:
            assert second.wait() == [2], second.output
            assert "another job is writing there: process" in second.output
        seen = max(steps_of(out))
        first.wait_for(lambda: max(steps_of(out)) > seen)
        assert events_of(out, "resumed") == []


def test_a_second_job_on_the_same_checkpoint_folder_is_refused(run_toml, tmp_path):
    """Otherwise the retention of each job would remove checkpoints of the other."""
    outs, shared = (tmp_path / "one", tmp_path / "two"), str(tmp_path / "checkpoints")
    argv = ("--training.steps", "3000", "--checkpoint.folder", shared)
    with LaunchedRun(1, outs[0], *argv_of(run_toml, outs[0], *argv)) as first:
        first.wait_for(lambda: steps_of(outs[0]))
        with LaunchedRun(1, outs[1], *argv_of(run_toml, outs[1], *argv)) as second:
            assert second.wait() == [2], second.output
            message = f"checkpoint.folder = {shared}: another job is writing there: process"
            assert message in second.output and "Traceback" not in second.output
            assert not (outs[1] / "lease.json").exists(), (
                "it must not keep the lease on its own folder"
            )
        only = ("--checkpoint.load_only", "true", "--training.steps", "1")
        with LaunchedRun(1, outs[1], *argv_of(run_toml, outs[1], *argv, *only)) as reader:
            assert reader.wait() == [0], reader.output  # load_only writes nothing there


def test_a_job_that_lost_its_lease_exits_and_writes_nothing_more(run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(2, out, *argv_of(run_toml, out, "--training.steps", "30000")) as run:
        run.wait_for(lambda: steps_of(out))
        (out / "lease.json").write_text("{}")
        assert run.wait() == [2, 2], run.output
        assert "has taken it from this job" in run.output
    starts = (out / "starts.jsonl").read_text().splitlines()
    assert len(starts) == 1 and '"start"' in starts[0], (
        "it must not record an end in the log of the other job"
    )


@pytest.mark.parametrize(
    "number, reported", [(signal.SIGSTOP, "no heartbeat for"), (signal.SIGKILL, "has died")]
)
def test_a_frozen_or_killed_rank_is_named_and_the_others_exit_in_time(
    number, reported, run_toml, tmp_path
):
    out, timeout = tmp_path / "out", 6
    argv = ("--training.steps", "30000", "--comm.train_timeout_seconds", str(timeout))
    with LaunchedRun(
        3, out, *argv_of(run_toml, out, "--training.global_batch_size", "6", *argv)
    ) as run:
        run.wait_for(lambda: steps_of(out)[-1:] > [2])
        began = time.monotonic()
        run.signal(1, number)
        codes = run.wait(timeout + 60, excluded=(1,))
        assert time.monotonic() - began < timeout + 60, "exited too late"
        assert [codes[0], codes[2]] == [1, 1], run.output
        assert run.output.count("titanlite: ") == 1 and "Traceback" not in run.output, run.output
        assert "Rank 1 (" in run.output and reported in run.output, run.output
    stacks = (out / "stacks" / "rank_0.txt").read_text()
    assert "in run_job" in stacks, stacks  # in a step, or already leaving it, if gloo was first
