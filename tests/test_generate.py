"""Text comes out of a checkpoint of any layout, and sampling does what its numbers say."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.faults.launch import Launched
from titanlite.checkpoint import Place
from titanlite.errors import CheckpointError, ConfigError
from titanlite.generate import Sampling, choose, generate, generate_text, open_model
from titanlite.models import FAMILIES, KeyValueCache, LlamaShape


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = LlamaShape(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, vocab_size=61)
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
    assert list(generate(model, [3], 10, Sampling(temperature=0), end=end)) == greedy[: greedy.index(end)]


def test_ids_that_the_tokenizer_does_not_know_are_never_written(model):
    assert max(generate(model, [3], 40, Sampling(temperature=2.0))) >= 10
    assert max(generate(model, [3], 40, Sampling(temperature=2.0), known=10)) < 10


def drawn(sampling, probabilities, times=400) -> set[int]:
    generator, logits = torch.Generator().manual_seed(0), torch.tensor(probabilities).log()
    return {int(choose(logits, sampling, generator)) for _ in range(times)}


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


def test_the_script_writes_from_a_trained_checkpoint(run_toml, tmp_path):
    words = ("--training.steps", "2", "--model.tied_embeddings", "true")
    with Launched(1, tmp_path / "out", "--job.config_file", str(run_toml), *words) as trained:
        assert trained.wait() == [0], trained.said
    step = tmp_path / "out" / "checkpoint" / "step-2"
    script = [sys.executable, str(ROOT / "scripts" / "generate.py"), "--max-new-tokens", "12"]
    written = subprocess.run(
        [*script, "--checkpoint", str(step), "--prompt", "def "], capture_output=True, text=True
    )
    assert written.returncode == 0 and written.stdout.startswith("def "), written.stderr
    model, tokenizer = open_model(Place(step), torch.device("cpu"))
    assert model.output.weight is model.tok_embeddings.weight
    assert written.stdout == "def " + generate_text(model, tokenizer, "def ", 12, Sampling()) + "\n"

    wrong = subprocess.run(
        [*script, "--checkpoint", str(step.parent)], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "is not a checkpoint" in wrong.stderr
    with pytest.raises(CheckpointError):
        open_model(Place(step.parent), torch.device("cpu"))
