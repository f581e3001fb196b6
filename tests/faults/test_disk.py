"""A full disk fails saves, but not the run, and damages no existing file."""

from __future__ import annotations

import resource
import signal

import pytest

from tests.faults.launch import LaunchedRun, events_of, steps_of
from titanlite.checkpoint import check_hashes, read_checkpoint_manifest
from titanlite.distributed import disk_memory
from titanlite.parallelize import activation_offload
from titanlite.storage import StorageFolder

ASYNC = ("--checkpoint.async_mode", "async", "--checkpoint.interval", "4")
LONG = ("--training.steps", "30000", "--validation.enable", "false")


def limit_file_size(run: LaunchedRun, max_bytes: int) -> None:
    """Let writes beyond `max_bytes` of a file fail from now on, as on a full disk."""
    for process in run.processes:
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (max_bytes, hard))


def test_training_continues_on_a_full_disk_and_old_checkpoints_stay_valid(run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(2, out, "--job.config_file", str(run_toml), *ASYNC, *LONG) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        limit_file_size(run, 60_000)  # shards are larger, metrics.jsonl is smaller
        run.wait_for(lambda: len(events_of(out, "checkpoint_failed")) > 2)
        failed = events_of(out, "checkpoint_failed")
        saved = [StorageFolder(event["path"]) for event in events_of(out, "checkpoint_saved")]
        manifest = read_checkpoint_manifest(saved[-1])
        check_hashes(saved[-1], manifest, manifest.files)
        limit_file_size(run, resource.RLIM_INFINITY)
        run.wait_for(lambda: len(events_of(out, "checkpoint_saved")) > len(saved))
        run.signal(0, signal.SIGTERM)
        assert run.wait() == [75, 75], run.output
    assert [event["failures"] for event in failed[:3]] == [1, 2, 3]
    assert "too large" in failed[0]["problem"]
    assert run.output.count("checkpoint failed") == len(events_of(out, "checkpoint_failed"))
    assert steps_of(out) == list(range(1, len(steps_of(out)) + 1))


def test_a_run_that_cannot_write_its_last_checkpoint_exits_with_an_error(run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(1, out, "--job.config_file", str(run_toml), *LONG) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        limit_file_size(run, 60_000)
        run.signal(0, signal.SIGTERM)
        assert run.wait() == [2], run.output
    assert (
        "titanlite: " in run.output and "too large" in run.output and not events_of(out, "stopped")
    )


def test_a_resume_on_a_full_disk_fails_and_leaves_the_files_of_the_run_unchanged(
    run_toml, tmp_path
):
    out = tmp_path / "out"
    argv = ("--job.config_file", str(run_toml), "--checkpoint.interval", "2")
    with LaunchedRun(2, out, *argv) as run:
        assert run.wait() == [0, 0], run.output
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # a torn line, so that the resume rewrites the file
    before = {name: (out / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}
    with LaunchedRun(2, out, *argv, "--training.steps", "8", max_file_bytes=3000) as run:
        assert run.wait() == [2, 2], run.output
    assert (
        "cannot write" in run.output and "too large" in run.output and "Traceback" not in run.output
    )
    assert {name: (out / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("keys", [("checkpoint.enable", "false"), ("checkpoint.load_only", "true")])
def test_a_run_without_checkpoints_does_not_overwrite_the_records_of_one_with_them(
    run_toml, tmp_path, keys
):
    out, argv = tmp_path / "out", ("--job.config_file", str(run_toml))
    records = ("config.toml", "metrics.jsonl")
    with LaunchedRun(1, out, *argv) as run:
        assert run.wait() == [0], run.output
    before = {name: (out / name).read_bytes() for name in records}
    with LaunchedRun(1, out, *argv, f"--{keys[0]}", keys[1], "--training.steps", "7") as run:
        assert run.wait() == [0], run.output
    assert {name: (out / name).read_bytes() for name in records} == before
    assert steps_of(out / "unsaved")[-1] == 7 and (out / "unsaved" / "config.toml").exists()


def let_activations_need_more_than_the_disk_has() -> None:
    activation_offload.MIN_BYTES = 1
    disk_memory.PIECE_BYTES, disk_memory.MIN_GB_PER_S = disk_memory.PAGE, 0
    disk_memory.free_bytes = lambda folder: disk_memory.PAGE


def test_a_disk_that_fills_in_a_pipeline_stage_is_a_user_error(run_toml, tmp_path):
    """torch raises an error of its own, with the arguments of the stage, from that of the disk."""
    argv = ["--activation_checkpoint.offload", "true", "--activation_checkpoint.offload_folder"]
    argv += [str(tmp_path), "--parallelism.pipeline_parallel_degree", "2", "--model.n_layers", "4"]
    argv += ["--job.config_file", str(run_toml)]
    full = let_activations_need_more_than_the_disk_has
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=full) as run:
        assert 2 in run.wait(), run.output
    assert "bytes are needed on this rank, and 4,096 are free" in run.output
    assert "Traceback" not in run.output
