"""A disk that fills up while a run is saving costs checkpoints, never the run."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.faults.launch import Launched, events_of, steps_of
from titanlite.checkpoint import check_hashes, read_checkpoint_manifest
from titanlite.storage import StorageFolder

ASYNC = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "4")
LONG = ("--training.steps", "30000", "--validation.enable", "false")


def limit(run: Launched, most: int) -> None:
    """From now on the ranks write no file longer than `most` bytes, as on a disk that is full."""
    for process in run.processes:
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, hard))


def test_training_goes_on_and_the_old_checkpoint_stays_true(run_toml, tmp_path):
    out = tmp_path / "out"
    with Launched(2, out, "--job.config_file", str(run_toml), *ASYNC, *LONG) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        limit(run, 60_000)  # a shard has more, metrics.jsonl less
        run.wait_for(lambda: len(events_of(out, "checkpoint_failed")) > 2)
        failed = events_of(out, "checkpoint_failed")
        saved = [StorageFolder(event["path"]) for event in events_of(out, "checkpoint_saved")]
        manifest = read_checkpoint_manifest(saved[-1])
        check_hashes(saved[-1], manifest, manifest.files)
        limit(run, resource.RLIM_INFINITY)
        run.wait_for(lambda: len(events_of(out, "checkpoint_saved")) > len(saved))
        run.signal(0, signal.SIGTERM)
        assert run.wait() == [75, 75], run.said
    assert [event["failures"] for event in failed[:3]] == [1, 2, 3]
    assert "too large" in failed[0]["problem"]
    assert run.said.count("checkpoint failed") == len(events_of(out, "checkpoint_failed"))
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_a_run_that_cannot_save_its_end_does_not_say_that_it_did(run_toml, tmp_path):
    out = tmp_path / "out"
    with Launched(1, out, "--job.config_file", str(run_toml), *LONG) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        limit(run, 60_000)
        run.signal(0, signal.SIGTERM)
        assert run.wait() == [2], run.said
    assert "titanlite: " in run.said and "too large" in run.said and not events_of(out, "stopped")


def test_a_full_disk_refuses_a_resume_and_leaves_the_files_of_the_run_whole(run_toml, tmp_path):
    out = tmp_path / "out"
    argv = ("--job.config_file", str(run_toml), "--checkpoint.interval", "2")
    with Launched(2, out, *argv) as run:
        assert run.wait() == [0, 0], run.said
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # so that the resume has to write the file anew
    before = {name: (out / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}
    with Launched(2, out, *argv, "--training.steps", "8", max_file_bytes=3000) as run:
        assert run.wait() == [2, 2], run.said
    assert "cannot write" in run.said and "too large" in run.said and "Traceback" not in run.said
    assert {name: (out / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("keys", [("checkpoint.enable", "false"), ("checkpoint.load_only", "true")])
def test_a_run_that_does_not_save_leaves_the_records_of_one_that_does(run_toml, tmp_path, keys):
    out, argv = tmp_path / "out", ("--job.config_file", str(run_toml))
    records = ("config.toml", "metrics.jsonl")
    with Launched(1, out, *argv) as run:
        assert run.wait() == [0], run.said
    before = {name: (out / name).read_bytes() for name in records}
    with Launched(1, out, *argv, f"--{keys[0]}", keys[1], "--training.steps", "7") as run:
        assert run.wait() == [0], run.said
    assert {name: (out / name).read_bytes() for name in records} == before
    assert steps_of(out / "unsaved")[-1] == 7 and (out / "unsaved" / "config.toml").exists()
