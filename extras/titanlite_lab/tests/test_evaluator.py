"""Evaluation of the checkpoints of a run while it trains."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from titanlite.checkpoint.manifest import (
    CheckpointManifest,
    TensorRecord,
    write_checkpoint_manifest,
)
from titanlite.errors import CheckpointError, ConfigError
from titanlite.storage import StorageFolder
from titanlite_lab.evaluation import watch
from titanlite_lab.evaluation.command import run_evaluation
from titanlite_lab.evaluation.results import EvaluationResult, TaskScores, weights_hash
from titanlite_lab.evaluation.run_tasks import load_tasks


class SavingRun:
    """The folder of a run that saves checkpoints, and what is evaluated of it."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.evaluated = folder, []
        monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
        (folder / "config.toml").write_text('[checkpoint]\nfolder = "saved"\n')

    def save(self, step: int, weights: str = "first") -> None:
        tensors = {"model.w": TensorRecord([0], "float32", f"{weights}{step}")}
        job = {"training": {"steps": 30}}
        folder = StorageFolder(self.folder / "saved" / f"step-{step}")
        folder.create_folder()
        manifest = CheckpointManifest(step, {}, {}, job, "", {}, 0.0, {}, tensors)
        write_checkpoint_manifest(folder, manifest)

    def evaluate(self, folder: StorageFolder) -> EvaluationResult:
        step = int(folder.name.removeprefix("step-"))
        manifest = watch.read_checkpoint_manifest(folder)
        self.evaluated.append(step)
        scores = {"cloze": TaskScores(3, {"acc": 0.5})}
        return EvaluationResult(str(folder), step, weights_hash(manifest), scores, {}, {}, 1.5)

    def watch(self, **options) -> None:
        watch.watch_run(watch.Watch(self.folder, **options), self.evaluate)


def test_checkpoints_are_evaluated_once_the_newest_first(tmp_path, monkeypatch):
    """Otherwise evaluations that are slower than the run would fall behind forever."""
    run = SavingRun(tmp_path, monkeypatch)
    for step in (5, 10, 20, 30):
        run.save(step)
    run.watch(every=10)
    run.watch(every=10)  # after a restart, what is evaluated is not evaluated again
    assert run.evaluated == [30, 20, 10]
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"], line["acc"]) for line in lines] == [
        (30, "cloze", 0.5),
        (20, "cloze", 0.5),
        (10, "cloze", 0.5),
    ]
    run.save(20, weights="second")  # as after a roll-back
    (tmp_path / "evaluations.jsonl").open("a").write('{"step": 1')  # cut off by a crash
    run.watch(every=10)
    assert run.evaluated[3:] == [20]


def test_a_watch_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    run = SavingRun(tmp_path, monkeypatch)
    run.save(10)
    watching = threading.Thread(target=run.watch, daemon=True)
    watching.start()
    while run.evaluated != [10]:
        assert watching.is_alive()
    (tmp_path / "saved" / "step-20").mkdir()  # a save that is not committed
    run.save(30)
    watching.join()
    assert run.evaluated == [10, 30]


def test_a_checkpoint_that_cannot_be_evaluated_is_left_out(tmp_path, monkeypatch):
    run = SavingRun(tmp_path, monkeypatch)
    run.save(10)
    run.save(30)
    evaluate = run.evaluate

    def fail_at_30(folder: StorageFolder) -> EvaluationResult:
        result = evaluate(folder)
        if result.step == 30:
            raise CheckpointError("removed meanwhile")
        return result

    run.evaluate = fail_at_30
    run.watch()
    assert run.evaluated == [30, 10]


def test_mistakes_of_a_watch_are_errors(tmp_path, capsys):
    assert run_evaluation(["a_model", "--watch", str(tmp_path)]) == 2
    assert "give one of a model and --watch RUN" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no such folder"):
        watch.watch_run(watch.Watch(tmp_path / "typo"), lambda folder: None)


def test_a_yaml_file_of_a_task_needs_allow_code(tmp_path):
    (tmp_path / "task").write_text("task: mine\ndoc_to_text: !function mine.run\n")
    for name in ("mine.yaml", str(tmp_path / "task")):
        with pytest.raises(ConfigError, match="a YAML file can run code") as refusal:
            load_tasks(["python", name])
        assert "--allow-code" in refusal.value.fix
