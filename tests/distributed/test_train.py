"""The whole command: real torchrun where that matters, real processes and files always."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.faults.launch import LaunchedRun, lines_of


def torchrun(ranks: int, toml, *argv) -> subprocess.CompletedProcess:
    launch = ["bash", str(ROOT / "scripts/launch.sh"), str(ranks)]
    command = launch if ranks else [sys.executable]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where torchrun is
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(
        [*command, str(ROOT / "train.py"), "--job.config_file", str(toml), *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )


def launched(ranks: int, folder, toml, *argv) -> None:
    with LaunchedRun(ranks, folder, "--job.config_file", str(toml), *argv) as run:
        assert run.wait() == [0] * ranks, run.output


def curve(folder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder) if "event" not in line}


def test_a_run_stopped_and_resumed_under_another_layout_is_the_unstopped_run(run_toml, tmp_path):
    """Python alone; then 3 steps by FSDP, one by tensor parallel, and the rest by a pipeline."""
    alone, moved = tmp_path / "alone", tmp_path / "moved"

    def train(ranks: int, folder, *argv) -> None:
        launched(ranks, folder, run_toml, "--job.dump_folder", str(folder), *argv)

    train(1, alone, "--metrics.enable_tensorboard=true")
    schedule = ("--lr_scheduler.total_steps", "6")
    first = torchrun(2, run_toml, *schedule, "--training.steps", "3", f"--job.dump_folder={moved}")
    assert first.returncode == 0, first.stderr
    assert "TCPStore" not in first.stderr  # the store goes with rank 0, after the others have left
    split = ("--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4")
    train(2, moved, *schedule, *split, "--training.steps", "4")
    stages = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
    train(2, moved, *schedule, *stages)

    right, found = curve(alone), curve(moved)
    assert list(right) == list(found) == [1, 2, 3, 4, 5, 6]
    assert found == pytest.approx(right, rel=1e-5)
    for folder in (alone, moved):
        steps = [line for line in lines_of(folder) if "event" not in line]
        assert [line["tokens"] for line in steps] == [step * 8 * 48 for step in range(1, 7)]
        assert [line["samples"] for line in steps] == [step * 8 for step in range(1, 7)]

    events = {(line["event"], line["step"]): line for line in lines_of(moved) if "event" in line}
    assert ("resumed", 3) in events and ("checkpoint_saved", 6) in events
    for line in lines_of(alone):
        if line.get("event") == "validation":  # after step 3 by FSDP, after step 6 by the pipeline
            same = events["validation", line["step"]]
            assert same["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert {"config.toml", "metrics.jsonl", "checkpoint", "tb"} <= set(os.listdir(alone))

    again = torchrun(0, alone / "config.toml", "--training.steps", "7")  # a finished run goes on
    assert again.returncode == 0, again.stderr
    assert list(curve(alone)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_checkpoint_that_does_not_fit_is_refused_once_with_exit_2(run_toml, tmp_path):
    launched(1, tmp_path / "out", run_toml, "--training.steps", "1")
    refused = torchrun(2, run_toml, "--model.dim", "64", "--optimizer.name", "SGD")
    assert refused.stderr.count("model (dim: 32 saved, 64 now)") == 1, refused.stderr
    assert refused.stderr.count("optimizer.name (AdamW saved, SGD now)") == 1
    assert "exitcode  : 2" in refused.stderr
    assert 'train.py", line' not in refused.stderr  # torchrun's own traceback is not ours
