"""train.py as a command: with torchrun where it matters, always with real processes and files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun, lines_of


def torchrun(python: str, ranks: int, toml, *argv) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts/launch.sh"), str(ranks)]
    path = f"{Path(python).parent}:{os.environ['PATH']}"  # where torchrun is
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(
        [*command, str(ROOT / "train.py"), "--job.config_file", str(toml), *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG_SECONDS,
    )


def run_ranks(ranks: int, folder, toml, *argv) -> None:
    with LaunchedRun(ranks, folder, "--job.config_file", str(toml), *argv) as run:
        assert run.wait() == [0] * ranks, run.output


def losses_of(folder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(folder) if "event" not in line}


TIED = ("--model.tied_embeddings", "true")
RAMP = (  # batch size, learning rate and weight decay as functions of the tokens consumed
    *("--training.batch_size_ramp", "0:4 300:8 1.1K:12", "--training.global_batch_size", "12"),
    *("--lr_scheduler.warmup_steps", "none", "--lr_scheduler.warmup_tokens", "500"),
    *("--lr_scheduler.weight_decay_type", "cosine"),
    *("--lr_scheduler.final_weight_decay_factor", "0.1"),
)
RAMP_SAMPLES = [4, 8, 16, 24, 36, 48]  # consumed after each step


def test_a_run_resumed_under_other_layouts_matches_an_uninterrupted_run(run_toml, tmp_path, python):
    """One process, against FSDP to step 3, tensor parallel to step 4, and a pipeline to the end."""
    reference, resumed = tmp_path / "reference", tmp_path / "resumed"

    def train(ranks: int, folder, *argv) -> None:
        run_ranks(ranks, folder, run_toml, "--job.dump_folder", str(folder), *TIED, *RAMP, *argv)

    train(1, reference, "--metrics.enable_tensorboard=true")
    schedule = ("--lr_scheduler.total_tokens", "2304")  # as without it in a run of 6 steps
    first = torchrun(
        *(python, 2, run_toml, *TIED, *RAMP, *schedule, "--training.steps", "3"),
        f"--job.dump_folder={resumed}",
    )
    assert first.returncode == 0, first.stderr
    assert "TCPStore" not in first.stderr  # rank 0 closes the store after the others have exited
    tensor = ("--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4")
    train(2, resumed, *schedule, *tensor, "--training.steps", "4")
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
    train(2, resumed, *schedule, *pipeline)

    expected, actual = losses_of(reference), losses_of(resumed)
    assert list(expected) == list(actual) == [1, 2, 3, 4, 5, 6]
    assert actual == pytest.approx(expected, rel=1e-5)
    for folder in (reference, resumed):
        steps = [line for line in lines_of(folder) if "event" not in line]
        assert [line["tokens"] for line in steps] == [48 * samples for samples in RAMP_SAMPLES]
        assert [line["samples"] for line in steps] == RAMP_SAMPLES
        # warmup to token 500, then linear to token 2304
        factors = [192 / 500, 384 / 500, 768 / 500, 1536 / 1804, 1152 / 1804, 576 / 1804]
        rates = [8e-4 * min(1.0, factor) for factor in factors]
        assert [line["lr"] for line in steps] == pytest.approx(rates)

    events = {(line["event"], line["step"]): line for line in lines_of(resumed) if "event" in line}
    assert ("resumed", 3) in events and ("checkpoint_saved", 6) in events
    for line in lines_of(reference):
        if (
            line.get("event") == "validation"
        ):  # after step 3 with FSDP, after step 6 with the pipeline
            same = events["validation", line["step"]]
            assert same["loss"] == pytest.approx(line["loss"], rel=1e-5)
    assert {"config.toml", "metrics.jsonl", "checkpoint", "tb"} <= set(os.listdir(reference))

    # continues a finished run
    run_ranks(1, reference, reference / "config.toml", "--training.steps", "7")
    assert list(losses_of(reference)) == [1, 2, 3, 4, 5, 6, 7]


def test_a_run_with_sophia_uses_its_estimates_and_resumes_under_another_layout(run_toml, tmp_path):
    """With FSDP to step 3, then tensor parallel; without estimates, gamma would have no effect."""

    def train(ranks: int, name: str, *argv: str, gamma: str = "1e4") -> dict[int, float]:
        folder, sophia = tmp_path / name, ("--optimizer.name", "Sophia", "--optimizer.gamma", gamma)
        argv += ("--optimizer.hessian_frequency", "2", "--job.dump_folder", str(folder))
        run_ranks(ranks, folder, run_toml, *sophia, *argv)
        return losses_of(folder)

    expected = train(1, "reference")
    train(2, "resumed", "--training.steps", "3", "--lr_scheduler.total_steps", "6")
    actual = train(2, "resumed", "--parallelism.tensor_parallel_degree", "2")
    assert list(actual) == list(expected) == [1, 2, 3, 4, 5, 6]
    assert actual == pytest.approx(expected, rel=1e-5)
    other = train(1, "other", gamma="1e5")
    assert [step for step in other if other[step] != expected[step]] == [3, 4, 5, 6]


def test_an_incompatible_checkpoint_is_one_error_and_exit_code_2(run_toml, tmp_path):
    run_ranks(1, tmp_path / "out", run_toml, "--training.steps", "1")
    argv = ("--job.config_file", str(run_toml), "--model.dim", "64", "--optimizer.name", "SGD")
    with LaunchedRun(2, tmp_path / "out", *argv) as run:
        assert run.wait() == [2, 2], run.output
        assert run.output.count("model (dim: 32 saved, 64 now)") == 1, run.output
        assert run.output.count("optimizer.name (AdamW saved, SGD now)") == 1
        assert "Traceback" not in run.output
