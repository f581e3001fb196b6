"""Text generation: from a checkpoint of any layout, with the requested sampling."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun
from titanlite.checkpoint import read_checkpoint_manifest, to_hugging_face
from titanlite.checkpoint.manifest import write_checkpoint_manifest
from titanlite.data import open_tokenizer
from titanlite.errors import CheckpointError, ConfigError
from titanlite.kernels.attention import KeyValueCache
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.storage import StorageFolder
from titanlite_corpus.bpe import train_bpe
from titanlite_corpus.prepare import PrepareSettings, prepare_corpus
from titanlite_lab.checkpoints import find_newest_checkpoint, from_hugging_face
from titanlite_lab.generate import Sampling, TextGenerator, generate, load_generator, sample_token

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = Llama3Sizes(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
    return FAMILIES["llama3"].build(sizes).eval()


def test_greedy_decoding_with_the_cache_equals_argmax_without_it(model):
    ids = [3, 1, 4]
    for _ in range(8):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(generate(model, [3, 1, 4], 8, Sampling(temperature=0))) == ids[3:]


def errors_in(dtype, model) -> list[float]:
    """Relative errors of a sequence's logits against fp32: with the cache, and without."""
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    lower = copy.deepcopy(model).to(dtype)
    caches = {name: KeyValueCache(ids.shape[1]) for name in lower.layers}
    with torch.no_grad():
        reference, in_one_call = model(ids), lower(ids)
        steps = [lower(ids[:, n : n + 1], torch.tensor([n]), caches) for n in range(ids.shape[1])]
    assert in_one_call.dtype == steps[0].dtype == caches["0"].keys.dtype == dtype
    results = torch.cat(steps, dim=1), in_one_call
    return [((x.float() - reference).norm() / reference.norm()).item() for x in results]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cache_loses_no_precision(model, dtype):
    with_cache, without = errors_in(dtype, model)
    assert 0 < with_cache <= 1.5 * without


def test_a_seed_determines_the_sampled_text(model):
    def ids(seed):
        return list(generate(model, [1], 20, Sampling(temperature=1.0, seed=seed)))

    assert ids(1) == ids(1) != ids(2)


def test_generation_stops_before_the_end_id(model):
    greedy = list(generate(model, [3], 10, Sampling(temperature=0)))
    end = greedy[4]
    stopped = list(generate(model, [3], 10, Sampling(temperature=0), ends=[end]))
    assert stopped == greedy[: greedy.index(end)]


def test_ids_outside_the_tokenizers_vocabulary_are_never_sampled(model):
    assert max(generate(model, [3], 40, Sampling(temperature=2.0))) >= 10
    assert max(generate(model, [3], 40, Sampling(temperature=2.0), vocab_size=10)) < 10


def sampled(sampling, probabilities, times=400) -> set[int]:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor(probabilities).log()
    return {int(sample_token(logits, sampling, generator)) for _ in range(times)}


def test_top_k_and_top_p_exclude_unlikely_tokens():
    probabilities = [0.1, 0.5, 0.3, 0.06, 0.04]
    assert sampled(Sampling(temperature=1.0), probabilities) == {0, 1, 2, 3, 4}
    assert sampled(Sampling(temperature=1.0, top_k=2), probabilities) == {1, 2}
    assert sampled(Sampling(temperature=1.0, top_p=0.6), probabilities) == {1, 2}
    assert sampled(Sampling(temperature=1.0, top_p=0.01), probabilities) == {1}
    assert sampled(Sampling(temperature=0.0), probabilities) == {1}
    assert sampled(Sampling(temperature=0.1), probabilities, 50) == {1}


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 2}])
def test_invalid_sampling_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match="must be"):
        Sampling(**wrong)


# --- from a checkpoint ---------------------------------------------------------------------------


class FixedTokenizer:
    """Encodes every text as the same ids."""

    bos_id, eos_id = 7, 8

    def encode(self, text: str) -> list[int]:
        return [1, 2] if text else []


def test_a_prompt_begins_with_the_token_that_preceded_documents_in_training():
    causal = TextGenerator(None, FixedTokenizer())
    assert (causal.prompt_ids("x"), causal.prompt_ids("")) == ([8, 1, 2], [8])
    with_bos = TextGenerator(None, FixedTokenizer(), bos=True, document_mask=True)
    assert (with_bos.prompt_ids("x"), with_bos.prompt_ids("")) == ([7, 1, 2], [7])
    instruct = TextGenerator(None, FixedTokenizer(), published={"eos_token_id": [3, 5]})
    assert (causal.end_ids, instruct.end_ids) == ({8}, {3, 5, 8})
    masked = TextGenerator(None, FixedTokenizer(), document_mask=True)
    assert (masked.prompt_ids("x"), masked.prompt_ids("")) == ([1, 2], [8])


@dataclass(frozen=True)
class Trained:
    """A run of two steps on a corpus with BOS, whose tokenizer file was moved afterwards."""

    run: Path
    step: Path
    tokenizer: Path  # where the file is now
    permuted: Path  # a tokenizer with the same tokens but other ids
    recorded: Path  # where the file was, as the checkpoint records it


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    texts = [path.read_text() for path in sorted((ROOT / "titanlite").glob("*.py"))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recorded, moved, permuted = (
        folder / name for name in ("t.model", "moved.model", "permuted.model")
    )
    train_bpe(texts, 300, recorded)
    tokenizer = open_tokenizer(str(recorded))
    settings = PrepareSettings(0.0, bos=True, workers=1)
    prepare_corpus([folder / "text.jsonl"], tokenizer, folder, settings)
    sources = f'[{{ name = "code", path = "{folder}/train" }}]'
    argv = ["--data.tokenizer", str(recorded), "--data.sources", sources, "--job.device", "cpu"]
    argv += ["--model.dim", "32", "--model.n_layers", "2", "--model.n_heads", "4"]
    argv += ["--model.n_kv_heads", "2", "--model.hidden_dim", "64", "--model.vocab_size", "304"]
    argv += ["--model.tied_embeddings", "true", "--training.steps", "2", "--training.seq_len", "48"]
    argv += ["--training.mixed_precision_param", "float32", "--checkpoint.enable", "true"]
    argv += ["--checkpoint.interval", "1", "--lr_scheduler.warmup_steps", "1"]
    out = folder / "my-run"  # a dash once broke the sorting of steps
    with LaunchedRun(1, out, *argv, "--job.dump_folder", str(out)) as launched:
        assert launched.wait() == [0], launched.output
    lines = recorded.read_bytes().splitlines()
    tokens = [line.split()[0] for line in lines]
    permuted.write_bytes(b"".join(b"%s %d\n" % (t, n) for n, t in enumerate(reversed(tokens))))
    recorded.rename(moved)
    return Trained(out, out / "checkpoint" / "step-2", moved, permuted, recorded)


def run_script(python: str, name: str, *argv) -> subprocess.CompletedProcess:
    command = [python, str(ROOT / "scripts" / name), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=HANG_SECONDS)


def test_the_script_generates_from_a_run_whose_tokenizer_file_was_moved(python, trained, tmp_path):
    options = ("--prompt", "def ", "--max-new-tokens", "12")
    done = run_script(python, "generate.py", "--checkpoint", trained.run, *options)
    assert done.returncode == 0, done.stderr
    generator = load_generator(StorageFolder(trained.step), torch.device("cpu"))
    assert generator.model.output.weight is generator.model.tok_embeddings.weight
    assert generator.prompt_ids("def ")[0] == generator.tokenizer.bos_id  # as in its corpus
    assert done.stdout == "def " + generator.complete("def ", 12, Sampling()) + "\n"
    refused = run_script(python, "generate.py", "--checkpoint", tmp_path)
    assert refused.returncode == 2 and "is not a checkpoint" in refused.stderr


def test_a_wrong_tokenizer_is_refused_for_generation_and_export(python, trained, tmp_path):
    right, wrong = (open_tokenizer(str(p)) for p in (trained.tokenizer, trained.permuted))
    assert right.vocab_size == wrong.vocab_size  # so only the fingerprint differs
    option = ("--tokenizer", trained.permuted)
    commands = [
        ("generate.py", "--checkpoint", trained.step, *option),
        ("checkpoint.py", "to-hf", trained.step, tmp_path / "out", *option),
    ]
    for command in commands:
        done = run_script(python, *command)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert right.fingerprint in done.stderr and wrong.fingerprint in done.stderr
    assert not (tmp_path / "out").exists()


def copy_with_manifest(trained: Trained, folder: Path, **changes) -> StorageFolder:
    """A copy of the checkpoint with a changed manifest and correct hashes."""
    shutil.copytree(trained.step, folder)
    manifest = read_checkpoint_manifest(StorageFolder(folder))
    write_checkpoint_manifest(StorageFolder(folder), dataclasses.replace(manifest, **changes))
    return StorageFolder(folder)


def without_tokenizer(trained: Trained, folder: Path, recorded: str) -> StorageFolder:
    """A checkpoint without a copy of its tokenizer, as older versions or attackers write it."""
    manifest = read_checkpoint_manifest(StorageFolder(trained.step))
    files = {name: file for name, file in manifest.files.items() if name != "tokenizer.model"}
    job = {**manifest.job, "data": {**manifest.job["data"], "tokenizer": recorded}}
    return copy_with_manifest(trained, folder, files=files, job=job)


def test_the_path_that_a_checkpoint_records_is_never_opened(trained, tmp_path):
    os.mkfifo(tmp_path / "fifo")  # opening it would block
    cpu = torch.device("cpu")
    for number, path in enumerate((tmp_path / "fifo", trained.permuted, trained.tokenizer)):
        place = without_tokenizer(trained, tmp_path / f"step-{number}", str(path))
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


def test_the_newest_valid_checkpoint_is_found_by_number(python, trained, tmp_path):
    """Sorting by a shell returned step-9 if the path has a dash, or if there is an export."""
    run = tmp_path / "a-run"
    (run / "checkpoint").mkdir(parents=True)
    for step in (9, 10, 100):
        shutil.copytree(trained.step, run / "checkpoint" / f"step-{step}")
    (run / "checkpoint" / "step-100-hf").mkdir()
    (run / "checkpoint" / "step-11.aside-1").mkdir()
    (run / "checkpoint" / "step-100" / "manifest.json").unlink()  # never committed
    done = run_script(python, "checkpoint.py", "newest", run)
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
