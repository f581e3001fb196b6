"""Text comes out of a checkpoint of any layout, and sampling does what its numbers say."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.faults.launch import Launched
from titanlite.checkpoint import (
    find_newest_checkpoint,
    from_hugging_face,
    read_checkpoint_manifest,
    to_hugging_face,
)
from titanlite.checkpoint.manifest import write_checkpoint_manifest
from titanlite.data import open_tokenizer
from titanlite.data.bpe import train_bpe
from titanlite.data.prepare import prepare_corpus
from titanlite.errors import CheckpointError, ConfigError
from titanlite.generate import Sampling, TextGenerator, generate, load_generator, sample_token
from titanlite.kernels.attention import KeyValueCache
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.storage import StorageFolder


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
    return FAMILIES["llama3"].build(shape).eval()


def test_greedy_text_is_what_the_whole_model_likes_best(model):
    """With the cache, token after token, as without it, over the whole sequence each time."""
    ids = [3, 1, 4]
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(generate(model, [3, 1, 4], 8, Sampling(temperature=0))) == ids[3:]


def errors_in(dtype, model) -> list[float]:
    """How far logits of a sequence are from fp32, with the cache and without: relative."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    lower = copy.deepcopy(model).to(dtype)
    caches = {name: KeyValueCache(ids.shape[1]) for name in lower.layers}
    with torch.no_grad():
        right, whole = model(ids), lower(ids)
        steps = [lower(ids[:, n : n + 1], torch.tensor([n]), caches) for n in range(ids.shape[1])]
    assert whole.dtype == steps[0].dtype == caches["0"].keys.dtype == dtype
    found = torch.cat(steps, dim=1), whole
    return [((logits.float() - right).norm() / right.norm()).item() for logits in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cache_costs_no_precision(model, dtype):
    with_cache, without = errors_in(dtype, model)
    assert 0 < with_cache <= 1.5 * without


def test_a_seed_says_what_is_written(model):
    def text(seed):
        return list(generate(model, [1], 20, Sampling(temperature=1.0, seed=seed)))

    assert text(1) == text(1) != text(2)


def test_the_end_is_where_it_stops_and_is_not_written(model):
    greedy = list(generate(model, [3], 10, Sampling(temperature=0)))
    end = greedy[4]
    assert (
        list(generate(model, [3], 10, Sampling(temperature=0), end=end))
        == greedy[: greedy.index(end)]
    )


def test_ids_that_the_tokenizer_does_not_know_are_never_written(model):
    assert max(generate(model, [3], 40, Sampling(temperature=2.0))) >= 10
    assert max(generate(model, [3], 40, Sampling(temperature=2.0), known=10)) < 10


def drawn(sampling, probabilities, times=400) -> set[int]:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor(probabilities).log()
    return {int(sample_token(logits, sampling, generator)) for _ in range(times)}


def test_top_k_and_top_p_leave_out_the_unlikely():
    probabilities = [0.1, 0.5, 0.3, 0.06, 0.04]
    assert drawn(Sampling(temperature=1.0), probabilities) == {0, 1, 2, 3, 4}
    assert drawn(Sampling(temperature=1.0, top_k=2), probabilities) == {1, 2}
    assert drawn(Sampling(temperature=1.0, top_p=0.6), probabilities) == {1, 2}
    assert drawn(Sampling(temperature=1.0, top_p=0.01), probabilities) == {1}  # one always stays
    assert drawn(Sampling(temperature=0.0), probabilities) == {1}
    assert drawn(Sampling(temperature=0.1), probabilities, 50) == {1}


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 2}])
def test_a_number_without_meaning_is_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**wrong)


# --- from a checkpoint ---------------------------------------------------------------------------


class Fixed:
    """Stands for a tokenizer of which only the ids matter."""

    bos_id, eos_id = 7, 8

    def encode(self, text: str) -> list[int]:
        return [1, 2] if text else []


def test_a_prompt_stands_behind_what_a_document_stood_behind_in_training():
    causal = TextGenerator(None, Fixed())
    assert (causal.prompt_ids("x"), causal.prompt_ids("")) == ([8, 1, 2], [8])
    with_bos = TextGenerator(None, Fixed(), bos=True, documents_apart=True)
    assert (with_bos.prompt_ids("x"), with_bos.prompt_ids("")) == ([7, 1, 2], [7])
    apart = TextGenerator(None, Fixed(), documents_apart=True)  # none attended to the end before it
    assert (apart.prompt_ids("x"), apart.prompt_ids("")) == ([1, 2], [8])


@dataclass(frozen=True)
class Trained:
    """A run of two steps on a corpus with BOS; its tokenizer's file has moved since."""

    run: Path
    step: Path
    tokenizer: Path  # where it is now
    permuted: Path  # the same tokens, other ids
    recorded: Path  # where it was


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    texts = [path.read_text() for path in sorted((ROOT / "titanlite").glob("*.py"))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recorded, now, permuted = (
        folder / name for name in ("t.model", "moved.model", "permuted.model")
    )
    train_bpe(texts, 300, recorded)
    tokenizer = open_tokenizer(str(recorded))
    prepare_corpus([folder / "text.jsonl"], tokenizer, folder, 0.0, bos=True, workers=1)
    sources = f'[{{ name = "code", path = "{folder}/train" }}]'
    words = ["--data.tokenizer", str(recorded), "--data.sources", sources, "--job.device", "cpu"]
    words += ["--model.dim", "32", "--model.n_layers", "2", "--model.n_heads", "4"]
    words += ["--model.n_kv_heads", "2", "--model.hidden_dim", "64", "--model.vocab_size", "304"]
    words += [
        "--model.tied_embeddings",
        "true",
        "--training.steps",
        "2",
        "--training.seq_len",
        "48",
    ]
    words += ["--training.mixed_precision_param", "float32", "--checkpoint.enable", "true"]
    words += ["--checkpoint.interval", "1", "--lr_scheduler.warmup_steps", "1"]
    out = folder / "my-run"  # with a dash, at which sorting by a shell stumbled
    with Launched(1, out, *words, "--job.dump_folder", str(out)) as launched:
        assert launched.wait() == [0], launched.said
    lines = recorded.read_bytes().splitlines()
    tokens = [line.split()[0] for line in lines]
    permuted.write_bytes(b"".join(b"%s %d\n" % (t, n) for n, t in enumerate(reversed(tokens))))
    recorded.rename(now)
    return Trained(out, out / "checkpoint" / "step-2", now, permuted, recorded)


def run_script(name: str, *argv) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)


def test_the_script_writes_from_a_run_whose_tokenizer_has_moved(trained, tmp_path):
    options = ("--prompt", "def ", "--max-new-tokens", "12")
    written = run_script("generate.py", "--checkpoint", trained.run, *options)
    assert written.returncode == 0, written.stderr
    writer = load_generator(StorageFolder(trained.step), torch.device("cpu"))
    assert writer.model.output.weight is writer.model.tok_embeddings.weight
    assert writer.prompt_ids("def ")[0] == writer.tokenizer.bos_id, "as its corpus has it"
    assert written.stdout == "def " + writer.write("def ", 12, Sampling()) + "\n"
    wrong = run_script("generate.py", "--checkpoint", tmp_path)
    assert wrong.returncode == 2 and "is not a checkpoint" in wrong.stderr


def test_a_wrong_tokenizer_neither_writes_nor_is_exported(trained, tmp_path):
    right, wrong = (open_tokenizer(str(p)) for p in (trained.tokenizer, trained.permuted))
    assert right.vocab_size == wrong.vocab_size, "nothing else would tell them apart"
    given = ("--tokenizer", trained.permuted)
    commands = [
        ("generate.py", "--checkpoint", trained.step, *given),
        ("convert_checkpoint.py", "to-hf", trained.step, tmp_path / "out", *given),
    ]
    for command in commands:
        done = run_script(*command)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert right.fingerprint in done.stderr and wrong.fingerprint in done.stderr
    assert not (tmp_path / "out").exists()


def rewritten(trained: Trained, folder: Path, **changes) -> StorageFolder:
    """A copy of the checkpoint whose manifest says something else, truly hashed."""
    shutil.copytree(trained.step, folder)
    manifest = read_checkpoint_manifest(StorageFolder(folder))
    write_checkpoint_manifest(StorageFolder(folder), dataclasses.replace(manifest, **changes))
    return StorageFolder(folder)


def without_copy(trained: Trained, folder: Path, recorded: str) -> StorageFolder:
    """A checkpoint as older titanlites wrote it, or as an attacker does."""
    manifest = read_checkpoint_manifest(StorageFolder(trained.step))
    files = {name: file for name, file in manifest.files.items() if name != "tokenizer.model"}
    job = {**manifest.job, "data": {**manifest.job["data"], "tokenizer": recorded}}
    return rewritten(trained, folder, files=files, job=job)


def test_the_path_that_a_checkpoint_records_is_never_opened(trained, tmp_path):
    os.mkfifo(tmp_path / "fifo")  # opening it would block
    cpu = torch.device("cpu")
    for number, path in enumerate((tmp_path / "fifo", trained.permuted, trained.tokenizer)):
        place = without_copy(trained, tmp_path / f"step-{number}", str(path))
        with pytest.raises(CheckpointError, match="has no copy of its tokenizer.*--tokenizer"):
            load_generator(place, cpu)
    ids = load_generator(place, cpu, str(trained.tokenizer)).prompt_ids("def ")
    assert ids == load_generator(StorageFolder(trained.step), cpu).prompt_ids("def ")


def test_a_damaged_copy_of_the_tokenizer_is_refused(trained, tmp_path):
    step = shutil.copytree(trained.step, tmp_path / "step-2")
    content = bytearray((step / "tokenizer.model").read_bytes())
    content[content.index(b"\n") - 3] ^= 1
    (step / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match="tokenizer.model.*its hash differs"):
        load_generator(StorageFolder(step), torch.device("cpu"))


def test_the_newest_valid_checkpoint_is_found_by_number(trained, tmp_path):
    """A shell's sort took step-9 for the newest where the path has a dash, or an export."""
    run = tmp_path / "a-run"
    (run / "checkpoint").mkdir(parents=True)
    for step in (9, 10, 100):
        shutil.copytree(trained.step, run / "checkpoint" / f"step-{step}")
    (run / "checkpoint" / "step-100-hf").mkdir()
    (run / "checkpoint" / "step-11.aside-1").mkdir()
    (run / "checkpoint" / "step-100" / "manifest.json").unlink()  # never committed
    done = run_script("checkpoint.py", "newest", run)
    assert done.stdout == f"{run}/checkpoint/step-10\n" and "step-100" in done.stderr
    for place in (run / "checkpoint", run / "checkpoint" / "step-10"):
        assert str(find_newest_checkpoint(StorageFolder(place))) == f"{run}/checkpoint/step-10"


def test_a_published_tokenizer_with_bos_goes_to_hugging_face_and_back(trained, tmp_path):
    cpu = torch.device("cpu")
    note = to_hugging_face(StorageFolder(trained.step), StorageFolder(tmp_path / "hf"))
    assert "It adds <|begin_of_text|> before a text" in note
    from_hugging_face(StorageFolder(tmp_path / "hf"), StorageFolder(tmp_path / "step-0"))
    here, back = (
        load_generator(StorageFolder(trained.step), cpu),
        load_generator(StorageFolder(tmp_path / "step-0"), cpu),
    )
    assert back.bos and back.prompt_ids("def f") == here.prompt_ids("def f")
