"""Convert checkpoints to Hugging Face and back, with the script and at the end of a run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers

from tests.checkpoint.test_huggingface import edit_json, export, random_model
from tests.distributed.oracle import SIZES
from tests.faults.launch import LaunchedRun, lines_of
from titanlite.data import open_tokenizer
from titanlite.errors import CheckpointError
from titanlite.storage import StorageFolder
from titanlite_cli.commands import checkpoint as checkpoint_script
from titanlite_cli.commands import generate as generate_script
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.template import open_chat_template
from titanlite_corpus.prepare import PrepareSettings, prepare_corpus
from titanlite_corpus.tests.chats import CHATML, write_tokenizer
from titanlite_lab.generate import Sampling, generate, load_generator


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
    assert checkpoint_script.main(["to-hf", str(first), str(exported)]) == 0  # the run
    assert f"exported from {step}" in capsys.readouterr().out
    assert checkpoint_script.main(["from-hf", str(exported), str(imported)]) == 0
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (exported / file).read_bytes() == (step.with_name("step-3-hf") / file).read_bytes()
    assert checkpoint_script.main(["to-hf", str(step), str(exported)]) == 2
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


def test_what_a_published_folder_says_survives_training_a_resume_and_the_export(
    tmp_path, monkeypatch, capsys
):
    published, tokenizer = tmp_path / "published", tmp_path / "tokenizer.json"
    folder = export(published, random_model(replace(SIZES, vocab_size=512)))
    write_tokenizer(published, CHATML)
    facts = {"eos_token_id": [401, 406], "max_position_embeddings": 4096}
    edit_json(folder, "config.json", **facts, auto_map={"AutoConfig": "code.Config"})
    generation = {"eos_token_id": [401, 404], "temperature": 0.6, "do_sample": True}
    (published / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(published / "tokenizer.json", tokenizer)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "some text " * 99}) + "\n")
    settings = PrepareSettings(0.0, workers=1)
    prepare_corpus([tmp_path / "text.jsonl"], open_tokenizer(str(tokenizer)), tmp_path, settings)
    toml, out, exported = tmp_path / "run.toml", tmp_path / "out", tmp_path / "exported"
    toml.write_text(
        f"""
        model.from = "{published}"
        job.device = "cpu"
        data.tokenizer = "{tokenizer}"
        data.sources = [{{ name = "text", path = "{tmp_path}/train" }}]
        training = {{ steps = 2, seq_len = 32, local_batch_size = 1 }}
        checkpoint.enable = true
        checkpoint.initial_load_path = "{published}"
        checkpoint.initial_load_in_hf = true
        """
    )
    train(toml, out, 1)
    shutil.rmtree(published)
    log = train(out / "config.toml", out, 1, "--training.steps", "3")
    assert "step-2" in log
    waits = []
    for script in (checkpoint_script, generate_script):
        monkeypatch.setattr(script, "log_waiting", lambda what: waits.append(what) or nullcontext())
    assert checkpoint_script.main(["to-hf", str(out), str(exported)]) == 0
    files = ("config.json", "generation_config.json", "tokenizer_config.json")
    config, kept, settings = (json.loads((exported / name).read_bytes()) for name in files)
    assert config["max_position_embeddings"] == 4096 and config["hidden_size"] == SIZES.dim
    assert config["eos_token_id"] == [401, 404]  # of generation_config.json, as transformers stops
    assert kept == generation and settings["chat_template"] == CHATML
    assert (exported / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    argv = ["--checkpoint", str(out), "--temperature", "0", "--max-new-tokens", "8", "--chat"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert generate_script.main(argv) == 0
    model = load_generator(StorageFolder(out / "checkpoint" / "step-3"), torch.device("cpu"))
    encoder = ChatEncoder(model.tokenizer, open_chat_template("chatml", model.tokenizer))
    chat, shown = [], ""
    for question in ("a", "b"):
        chat.append({"role": "user", "content": question})
        prompt, ends = encoder.encode_prompt(chat)
        options = {"ends": {401, 404, *ends}, "vocab_size": model.tokenizer.vocab_size}
        ids = generate(model.model, prompt, 8, Sampling(temperature=0), **options)
        chat.append({"role": "assistant", "content": model.tokenizer.decode(list(ids))})
        shown += chat[-1]["content"] + "\n"
    assert capsys.readouterr().out.endswith(shown) and shown.strip()
    peer = transformers.pipeline("text-generation", str(exported), dtype=torch.float32)
    unused = list(range(model.tokenizer.vocab_size, 512))  # ids of a random model only
    (said,) = peer(chat[:1], max_new_tokens=8, do_sample=False, suppress_tokens=unused)
    assert said["generated_text"][-1] == chat[1]
    assert [what.split()[0] for what in waits] == ["exporting", "loading", *["answering"] * 2]
    with pytest.raises(CheckpointError, match="has no chat template.*--template llama3"):
        generate_script.open_encoder(replace(model, published={}), None)
