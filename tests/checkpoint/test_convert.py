"""Convert checkpoints to Hugging Face and back, with the script and at the end of a run."""

from __future__ import annotations

import pytest
import torch

from scripts import checkpoint
from tests.faults.launch import LaunchedRun, lines_of
from titanlite.generate import load_generator
from titanlite.storage import StorageFolder


def train(run_toml, out, ranks: int, *argv) -> str:
    arguments = ("--job.config_file", str(run_toml), "--job.dump_folder", str(out), *argv)
    with LaunchedRun(ranks, out, *arguments) as run:
        assert run.wait() == [0] * ranks, run.output
        return run.output


def first_loss(out) -> float:
    return next(line["loss"] for line in lines_of(out) if "loss" in line)


def test_weights_are_equal_after_an_export_to_hugging_face_and_back(run_toml, tmp_path, capsys):
    first, step = tmp_path / "first", tmp_path / "first" / "checkpoint" / "step-3"
    log = train(run_toml, first, 2, "--training.steps", "3", "--checkpoint.last_save_in_hf", "true")
    assert "tokenizer.json gives the same ids as bytes" in log
    exported, imported = tmp_path / "exported", tmp_path / "imported"
    assert checkpoint.main(["to-hf", str(first), str(exported)]) == 0  # the run
    assert f"exported from {step}" in capsys.readouterr().out
    assert checkpoint.main(["from-hf", str(exported), str(imported)]) == 0
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (exported / file).read_bytes() == (step.with_name("step-3-hf") / file).read_bytes()
    assert checkpoint.main(["to-hf", str(step), str(exported)]) == 2
    assert "already exists and is not empty" in capsys.readouterr().err

    original = load_generator(StorageFolder(step), torch.device("cpu"))
    converted = load_generator(StorageFolder(imported), torch.device("cpu"))
    for name, weight in original.model.state_dict().items():
        assert torch.equal(converted.model.state_dict()[name], weight), name
    assert original.prompt_ids("def f(x):") == converted.prompt_ids("def f(x):")

    # Another run starts equally from all three, under any layout.
    tensor_parallel = (
        "--parallelism.tensor_parallel_degree",
        "2",
        "--training.local_batch_size",
        "4",
    )
    pipeline = ("--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "4")
    losses = []
    for path, hf, layout in (
        (step, "false", ()),
        (imported, "false", tensor_parallel),
        (exported, "true", pipeline),
    ):
        out = tmp_path / f"from {path.name}"
        initial = ("--checkpoint.initial_load_path", str(path))
        initial += ("--checkpoint.initial_load_in_hf", hf, "--training.steps", "1")
        train(run_toml, out, 2, *initial, *layout)
        losses.append(first_loss(out))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    assert losses[0] < first_loss(first) - 0.01


def test_an_export_in_bfloat16_does_not_prevent_resuming(run_toml, tmp_path):
    export = ("--checkpoint.last_save_in_hf", "true", "--checkpoint.export_dtype", "bfloat16")
    train(run_toml, tmp_path / "out", 1, "--training.steps", "2", *export)
    out = tmp_path / "out" / "checkpoint"
    weights = (out / "step-2-hf" / "model.safetensors").stat().st_size
    assert weights < 35_104 * 2 + 6000  # parameters and headers
    train(
        run_toml, tmp_path / "out", 1, "--training.steps", "3", *export
    )  # resumes from the full checkpoint
    assert (out / "step-3-hf" / "config.json").exists()


def test_a_hugging_face_folder_with_other_model_sizes_is_refused(run_toml, tmp_path):
    out = tmp_path / "out"
    train(run_toml, out, 1, "--training.steps", "1", "--checkpoint.last_save_in_hf", "true")
    arguments = ("--job.config_file", str(run_toml), "--job.dump_folder", str(tmp_path / "other"))
    initial = ("--checkpoint.initial_load_path", str(out / "checkpoint" / "step-1-hf"))
    initial += ("--checkpoint.initial_load_in_hf", "true", "--model.hidden_dim", "96")
    with LaunchedRun(1, tmp_path / "other", *arguments, *initial) as run:
        assert run.wait() == [2], run.output
        assert "hidden_dim: 64 saved, 96 now" in run.output
