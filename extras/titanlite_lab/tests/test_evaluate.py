"""Downstream evaluation of a real checkpoint; most of it needs lm-eval (pip install '.[eval]')."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from tests.faults.launch import LaunchedRun
from titanlite.checkpoint import read_checkpoint_manifest, read_saved_model, to_hugging_face
from titanlite.checkpoint.manifest import write_checkpoint_manifest
from titanlite.errors import ConfigError, DataError
from titanlite.storage import StorageFolder
from titanlite_lab.evaluation.command import run_evaluation
from titanlite_lab.evaluation.results import scores_of_tasks
from titanlite_lab.evaluation.run_tasks import TASK_SET, EvaluationSettings, evaluate_model
from titanlite_lab.generate import load_model

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)
CPU = torch.device("cpu")
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64}
SETTINGS = {
    "job.device": "cpu",
    "data.tokenizer": "bytes",
    "model.vocab_size": 258,
    **{f"model.{key}": value for key, value in SIZES.items()},
    "training.seq_len": 48,
    "training.global_batch_size": 8,
    "training.steps": 6,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": "true",
    "checkpoint.interval": 3,
    "checkpoint.async_mode": "async",
    "metrics.log_freq": 1,
}


def run_job(folder: Path, corpus: Path, **changes) -> list[dict]:
    """Train, and return the records of the run."""
    sources = f'[{{ name = "code", path = "{corpus}/train" }}]'
    settings = {**SETTINGS, **changes, "data.sources": sources, "job.dump_folder": folder}
    argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with LaunchedRun(1, folder, *argv) as launched:
        assert launched.wait(400) == [0], launched.output
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@dataclass(frozen=True)
class Runs:
    """A run with evaluations and the same one without: their folders and records."""

    evaluated: Path
    records: list[dict]
    plain: Path
    plain_records: list[dict]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Runs:
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("runs")
    evaluation = {"enable": "true", "freq": 3, "tasks": "python_cloze,python_choice", "limit": 6}
    changes = {f"evaluation.{key}": value for key, value in evaluation.items()}
    records = run_job(folder / "evaluated", corpus, **changes)
    return Runs(folder / "evaluated", records, folder / "plain", run_job(folder / "plain", corpus))


@pytest.fixture(scope="module")
def checkpoints(runs, tmp_path_factory) -> list[StorageFolder]:
    """The last checkpoint of the run, and a copy whose training documents began with BOS."""
    original = runs.plain / "checkpoint" / "step-6"
    copy = tmp_path_factory.mktemp("bos") / "step-6"
    shutil.copytree(original, copy)
    manifest = read_checkpoint_manifest(StorageFolder(copy))
    changed = dataclasses.replace(manifest, facts={**manifest.facts, "data.bos": True})
    write_checkpoint_manifest(StorageFolder(copy), changed)
    return [StorageFolder(original), StorageFolder(copy)]


@needs_lm_eval
def test_evaluation_inside_a_run_changes_no_bit_of_training(runs):
    saved = [
        read_checkpoint_manifest(StorageFolder(folder / "checkpoint" / "step-6"))
        for folder in (runs.evaluated, runs.plain)
    ]
    assert saved[0].tensors == saved[1].tensors  # the hashes of weights and moments
    assert saved[0].progress == saved[1].progress  # random generators included
    losses = [
        [(r["loss"], r["grad_norm"]) for r in records if "event" not in r]
        for records in (runs.records, runs.plain_records)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    events = [r for r in runs.records if r.get("event", "").startswith("evaluation")]
    assert {(e["step"], e["event"], e["name"]) for e in events} >= {
        (6, "evaluation", "python_cloze"),
        (6, "evaluation", "python_choice"),
    }
    assert all(0 <= event["acc"] <= 1 and event["documents"] == 6 for event in events)


class Request:
    """What lm-eval passes to a model."""

    def __init__(self, *args):
        self.args = args


TEXT = (ROOT / "titanlite" / "files.py").read_text()  # longer than the context of the model
PAIRS = [
    ("def f(x):\n    return", " x"),
    ("", "import os\n"),
    ("words with spaces  ", "end"),
    (TEXT[:400], TEXT[400:420]),
    ("if a", ":"),
    ("if a", ": b"),
]


@needs_lm_eval
@pytest.mark.parametrize("bos", [0, 1])
def test_a_checkpoint_has_the_scores_of_its_export_in_transformers(checkpoints, bos, tmp_path):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    from titanlite_lab.evaluation.checkpoint_lm import CheckpointLM

    saved = read_saved_model(checkpoints[bos])
    assert saved.bos is bool(bos)
    ours = CheckpointLM(saved, load_model(saved, CPU), batch_size=4)
    to_hugging_face(checkpoints[bos], StorageFolder(tmp_path / "hf"))
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", dtype="float32", batch_size=4)
    assert ours.max_length == theirs.max_length == 48
    requests = [Request(*pair) for pair in PAIRS]
    scores = zip(ours.loglikelihood(requests), theirs.loglikelihood(requests), strict=True)
    for (mine, greedy), (expected, expected_greedy) in scores:
        assert mine == pytest.approx(expected, rel=1e-6) and greedy == expected_greedy
    texts = [Request(TEXT), Request("x"), Request(TEXT[:48])]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(
        theirs.loglikelihood_rolling(texts), rel=1e-6
    )
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    prompts = [Request(text, dict(options)) for text in ("def ", "import os\n", TEXT)]
    assert ours.generate_until(prompts) == theirs.generate_until(prompts)


@needs_lm_eval
def test_the_script_gives_the_numbers_of_lm_eval_through_transformers(
    checkpoints, tmp_path, capsys
):
    pytest.importorskip("accelerate")
    to_hugging_face(checkpoints[0], StorageFolder(tmp_path / "hf"))
    results = []
    for model in (checkpoints[0], tmp_path / "hf"):
        out = tmp_path / "results.json"
        assert run_evaluation([str(model), "--out", str(out), "--limit", "8"]) == 0
        results.append(json.loads(out.read_bytes()))
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("python_cloze", "bits_per_byte", "perplexity"))
    ours, theirs = results
    assert ours["step"] == 6 and ours["weights"]
    assert ours["tasks"].keys() == theirs["tasks"].keys()
    for name, scores in ours["tasks"].items():
        assert scores["documents"] == theirs["tasks"][name]["documents"] > 0
        values, expected = scores["values"], theirs["tasks"][name]["values"]
        assert values == pytest.approx(expected, rel=1e-5), name
        counted = {key for key in expected if key.startswith("acc")}
        assert all(values[key] == expected[key] for key in counted)


def test_without_lm_eval_the_install_command_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_evaluation([str(tmp_path)]) == 2
    assert "pip install 'titanlite[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--threads", "--limit", "--shots"])
def test_a_negative_number_is_refused_without_a_traceback(option, capsys):
    assert run_evaluation(["run", option, "-1", "--device", "cpu"]) == 2
    assert f"{option} -1: must be at least 0" in capsys.readouterr().err


def test_mistakes_are_refused_before_anything_is_evaluated(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    (tmp_path / "manifest.json").write_text('{"format": 1, "shards": []}')
    for arguments, message in (
        ([str(tmp_path), "--out", str(tmp_path)], f"--out {tmp_path}: cannot be written (Is a dir"),
        ([str(tmp_path), "--out", "/dev/null/x/y.json"], "/y.json: cannot be written (Not a dir"),
        ([str(tmp_path)], f"{tmp_path}: is not a checkpoint"),  # but a folder of shards
    ):
        assert run_evaluation([*arguments, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


@needs_lm_eval
def test_what_cannot_be_evaluated_is_refused(checkpoints, tmp_path, monkeypatch):
    from lm_eval import tasks

    manager = tasks.TaskManager  # without lm-eval's own tasks, which take seconds to find

    def without_defaults(include_path, include_defaults):
        return manager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", without_defaults)

    def evaluate(model, *tasks):
        return evaluate_model(str(model), EvaluationSettings(tasks, allow_code=True), CPU)

    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\ndataset_path: json\ndataset_kwargs: {data_files: missing}\n")
    with pytest.raises(DataError, match="broken.yaml: cannot be loaded"):
        evaluate(checkpoints[0], str(broken))
    with pytest.raises(ConfigError, match="unknown tasks: python_clozes"):
        evaluate(checkpoints[0], "python_clozes")


def test_the_error_of_a_mean_is_its_standard_error():
    samples = [{"filter": "none", "acc": value, "f1": value} for value in (0, 1, 1, 1)]
    raw = {
        "results": {"t": {"alias": "t", "acc,none": 0.75, "f1,none": 0.5, "acc,loose": 1.0}},
        "samples": {"t": samples},
        "n-samples": {"t": {"effective": 4}},
    }
    (scores,) = scores_of_tasks(raw).values()
    assert scores.documents == 4
    # f1 is not the mean of its samples, so no formula holds for it
    expected = {"acc": 0.75, "acc_stderr": 0.25, "f1": 0.5, "acc/loose": 1.0}
    assert scores.values == pytest.approx(expected)


def test_the_documents_of_the_tasks_are_complete():
    for line in (TASK_SET / "python_choice.jsonl").read_text("utf-8").splitlines():
        document = json.loads(line)
        assert len(set(document["choices"])) == 4 and 0 <= document["answer"] < 4
    for line in (TASK_SET / "python_cloze.jsonl").read_text("utf-8").splitlines():
        document = json.loads(line)
        # Otherwise a tokenizer may merge the end of the text with the answer.
        last = document["text"][-1]
        assert last.isalnum() or last == " " or document["answer"][0] == " "
