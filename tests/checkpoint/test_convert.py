"""A checkpoint goes to Hugging Face and comes back, by hand and in the course of a run."""

from __future__ import annotations

import pytest
import torch

from scripts import convert_checkpoint
from tests.faults.launch import Launched, lines_of
from titanlite.generate import load_generator
from titanlite.storage import StorageFolder


def train(run_toml, out, ranks: int, *argv) -> str:
    words = ("--job.config_file", str(run_toml), "--job.dump_folder", str(out), *argv)
    with Launched(ranks, out, *words) as run:
        assert run.wait() == [0] * ranks, run.said
        return run.said


def first_loss(out) -> float:
    return next(line["loss"] for line in lines_of(out) if "loss" in line)


def test_weights_travel_to_hugging_face_and_back_in_the_course_of_runs(run_toml, tmp_path, capsys):
    first, step = tmp_path / "first", tmp_path / "first" / "checkpoint" / "step-3"
    said = train(
        run_toml, first, 2, "--training.steps", "3", "--checkpoint.last_save_in_hf", "true"
    )
    assert "tokenizer.json gives the same ids as bytes" in said
    exported, again = tmp_path / "exported", tmp_path / "again"
    assert convert_checkpoint.main(["to-hf", str(step), str(exported)]) == 0
    assert convert_checkpoint.main(["from-hf", str(exported), str(again)]) == 0
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (exported / file).read_bytes() == (step.with_name("step-3-hf") / file).read_bytes()
    assert convert_checkpoint.main(["to-hf", str(step), str(exported)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err

    right = load_generator(StorageFolder(step), torch.device("cpu"))
    back = load_generator(StorageFolder(again), torch.device("cpu"))
    for name, weight in right.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], weight), name
    assert right.prompt_ids("def f(x):") == back.prompt_ids("def f(x):")

    # All three are the same start of another run, whatever its layout.
    split = ("--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4")
    stages = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
    losses = []
    for path, hf, layout in (
        (step, "false", ()),
        (again, "false", split),
        (exported, "true", stages),
    ):
        out = tmp_path / f"from {path.name}"
        initial = ("--checkpoint.initial_load_path", str(path))
        initial += ("--checkpoint.initial_load_in_hf", hf, "--training.steps", "1")
        train(run_toml, out, 2, *initial, *layout)
        losses.append(first_loss(out))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    assert losses[0] < first_loss(first) - 0.01


def test_the_last_save_may_be_smaller(run_toml, tmp_path):
    small = ("--checkpoint.last_save_in_hf", "true", "--checkpoint.export_dtype", "bfloat16")
    train(run_toml, tmp_path / "out", 1, "--training.steps", "2", *small)
    out = tmp_path / "out" / "checkpoint"
    weights = (out / "step-2-hf" / "model.safetensors").stat().st_size
    assert weights < 35_104 * 2 + 6000  # parameters, and the names
    train(run_toml, tmp_path / "out", 1, "--training.steps", "3", *small)  # it can still go on
    assert (out / "step-3-hf" / "config.json").exists()


def test_a_folder_of_another_shape_is_refused(run_toml, tmp_path):
    out = tmp_path / "out"
    train(run_toml, out, 1, "--training.steps", "1", "--checkpoint.last_save_in_hf", "true")
    words = ("--job.config_file", str(run_toml), "--job.dump_folder", str(tmp_path / "other"))
    initial = ("--checkpoint.initial_load_path", str(out / "checkpoint" / "step-1-hf"))
    initial += ("--checkpoint.initial_load_in_hf", "true", "--model.hidden_dim", "96")
    with Launched(1, tmp_path / "other", *words, *initial) as run:
        assert run.wait() == [2], run.said
        assert "hidden_dim: 64 saved, 96 now" in run.said
