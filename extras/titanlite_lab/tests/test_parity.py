"""A parity bundle: other trainers agree with it, and what is wrong with one is named."""

from __future__ import annotations

import json
import runpy
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT
from tests.distributed.recipes import CHANGES
from tests.docs.pages import code_blocks
from titanlite.data import open_tokenizer
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest
from titanlite_lab.commands.parity import main

PAGE = ROOT / "docs" / "how-to" / "prove-your-trainer-agrees.md"
(LOOP,) = (b.text for b in code_blocks(PAGE) if b.file == "transformers_loop.py")
LLAMA = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 88}
UP = "model.layers.1.mlp.up_proj.weight"


def write_bundle(folder, family="llama3", *arguments) -> int:
    sizes = {"vocab_size": 61, **(LLAMA if family == "llama3" else CHANGES[family])}
    sizes["vocab_size"] = 61  # so that each batch has every token
    lines = [f"{name} = {value}" for name, value in sizes.items()]
    job = folder.parent / "job.toml"
    job.write_text("\n".join(["[model]", f'name = "{family}"', *lines, "[training]\nseq_len = 32"]))
    return main(["write", "--out", str(folder), "--job.config_file", str(job), *arguments])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    bundle = tmp_path_factory.mktemp("parity") / "bundle"
    assert write_bundle(bundle) == 0
    return bundle


def answer_with_transformers(bundle, folder, monkeypatch, *replaced: str) -> None:
    """Run the loop of the page, in which the text `replaced[0]` is replaced."""
    pytest.importorskip("transformers")
    if replaced:
        assert LOOP.count(replaced[0]) == 1
    script = folder.parent / "loop.py"
    script.write_text(LOOP.replace(*replaced) if replaced else LOOP)
    monkeypatch.setattr(sys, "argv", [str(script), str(bundle), str(folder)])
    runpy.run_path(str(script))


def compare(bundle, answer, capsys) -> tuple[int, str]:
    """(exit code, last line of the output or the error)."""
    capsys.readouterr()
    code = main(["compare", str(bundle), str(answer)])
    output = capsys.readouterr()
    return code, (output.out + output.err).strip().splitlines()[-1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_transformers_agrees(family, tmp_path, monkeypatch, capsys):
    """gemma3: and trains the embedding of token 0."""
    bundle, answer = tmp_path / "bundle", tmp_path / "answer"
    assert write_bundle(bundle, family) == 0
    answer_with_transformers(bundle, answer, monkeypatch)
    code, line = compare(bundle, answer, capsys)
    assert code == 0, line
    assert line.startswith("They agree")


def test_documents_of_the_jobs_data_agree(run_toml, tmp_path, monkeypatch, capsys):
    tokenizer, corpus = open_tokenizer("bytes"), tmp_path / "documents"
    corpus.mkdir()
    with ShardWriter(corpus / "shard", tokenizer.vocab_size) as writer:
        for length in range(1, 60):
            writer.add([*tokenizer.encode("titanlite " * 6)[:length], tokenizer.eos_id])
        record = writer.close()
    write_corpus_manifest(corpus, tokenizer.fingerprint, tokenizer.vocab_size, [record])
    bundle, answer = tmp_path / "bundle", tmp_path / "answer"
    job = ["--job.config_file", str(run_toml), "--attention.mask", "document"]
    job += ["--data.sources", f'[{{ name = "a", path = "{corpus}" }}]']
    assert main(["write", "--out", str(bundle), *job]) == 0
    positions = load_file(bundle / "batches/step-1.safetensors")["positions"]
    assert (positions == 0).sum() > len(positions)  # some documents begin within a sequence
    answer_with_transformers(bundle, answer, monkeypatch)
    assert compare(bundle, answer, capsys)[0] == 0


WRONG = {  # what a trainer does wrong -> (text of the loop, what replaces it), what differs first
    "labels shifted twice": (', "shift_labels": batch["labels"]', "", "loss in step 1"),
    "weight decay": ('lr=facts["learning_rate"]', "lr=0.1, weight_decay=0.1", "loss in step 2"),
    "an average over ranks": (
        "    loss.backward()",
        "    (loss / 2).backward()",
        "the gradient of lm_head.weight in step 1, by 5.0e-01",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_differs_first_is_named(fault, llama, tmp_path, monkeypatch, capsys):
    text, replacement, first = WRONG[fault]
    answer_with_transformers(llama, tmp_path / "answer", monkeypatch, text, replacement)
    code, line = compare(llama, tmp_path / "answer", capsys)
    assert code == 1 and line.startswith(f"They differ: first {first}")


def test_another_base_of_rope_is_found(llama, tmp_path, monkeypatch, capsys):
    """At initial weights, attention has too little effect on the loss; gradients differ."""
    changed = tmp_path / "changed"
    shutil.copytree(llama, changed)
    config = json.loads((changed / "weights/config.json").read_text())
    (changed / "weights/config.json").write_text(json.dumps(config | {"rope_theta": 1e4}))
    answer_with_transformers(changed, tmp_path / "answer", monkeypatch)
    code, line = compare(llama, tmp_path / "answer", capsys)
    assert code == 1 and line.startswith(
        "They differ: first the gradient of lm_head.weight in step 1"
    )


def change_gradient(answer, change, step: int = 2, name: str = UP) -> None:
    path = answer / f"gradients/step-{step}/model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)


@pytest.fixture
def copy(llama, tmp_path):
    """A bundle is the right answer to itself."""
    shutil.copytree(llama, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_gradient_that_is_wrong_by_a_hundredth_is_named(llama, copy, capsys):
    assert compare(llama, copy, capsys)[0] == 0
    change_gradient(copy, lambda gradient: gradient * 1.01)
    code, line = compare(llama, copy, capsys)
    assert code == 1
    assert line.startswith(f"They differ: first the gradient of {UP} in step 2, by 1.0e-02")
    path = copy / "gradients/step-1/model.safetensors"
    tensors = load_file(path)
    nan, others = tensors[UP] * torch.nan, {n: t for n, t in tensors.items() if n != UP}
    for gradients in ({**others, UP: nan}, others):
        save_file(gradients, path)
        code, line = compare(llama, copy, capsys)
        assert code == 1 and "in step 1, by inf" in line and "missing, inf or NaN" in line


def test_summaries_find_values_in_the_wrong_places(llama, copy, tmp_path, capsys):
    """Which change no norm."""
    bundle = tmp_path / "small"
    assert write_bundle(bundle, "llama3", "--max_gradient_gb", "0") == 0
    assert not (bundle / "gradients").exists()
    assert compare(bundle, copy, capsys)[0] == 0
    change_gradient(copy, lambda gradient: gradient.flip(0))
    code, line = compare(bundle, copy, capsys)
    assert code == 1 and line.startswith(f"They differ: first the gradient of {UP} in step 2")


def remove(*names: str):
    return lambda answer: [
        shutil.rmtree(p) if p.is_dir() else p.unlink() for p in map(answer.__truediv__, names)
    ]


def edit_losses(**changes):
    def edit(answer) -> None:
        content = json.loads((answer / "losses.json").read_text())
        content["steps"][0] |= changes
        (answer / "losses.json").write_text(json.dumps(content))

    return edit


REFUSED = {
    "losses.json: does not exist": remove("losses.json"),
    "step-2: has no .safetensors file": remove("gradients/step-2"),
    '"loss" is None; it must be a number': edit_losses(loss=None),
    'entry 1: must be an object with "step": 1': edit_losses(step=2),
    "tensors that the bundle does not have: wq": edit_losses(update_norms={"wq": 1.0}),
    "has shape [32, 88]; in weights/ of the bundle it has [88, 32]": (
        lambda answer: change_gradient(answer, torch.Tensor.t)
    ),
    "is torch.bfloat16; a bundle is compared in fp32": (
        lambda answer: change_gradient(answer, torch.Tensor.bfloat16)
    ),
    "is damaged or truncated": (
        lambda answer: (answer / "gradients/step-1/model.safetensors").write_bytes(b"text")
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_answer_that_cannot_be_compared_is_refused(message, llama, copy, capsys):
    REFUSED[message](copy)
    code, line = compare(llama, copy, capsys)
    assert code == 2 and message in line


def test_a_bundle_whose_tolerances_would_hide_bugs_is_refused(tmp_path, capsys):
    bundle = tmp_path / "bundle"
    assert write_bundle(bundle, "llama3", "--lr", "100") == 2
    assert "larger tolerances would hide bugs" in capsys.readouterr().err
    assert write_bundle(bundle, "qwen3_next") == 2
    assert "model.mtp_layers = 1: a bundle has the loss of the" in capsys.readouterr().err
    assert not bundle.exists()
    assert compare(bundle, bundle, capsys)[0] == 2
