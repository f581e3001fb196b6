"""Evaluation inside a run: what is started when, and that its end cannot hurt training."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT
from titanlite.checkpoint import CheckpointConfig
from titanlite.checkpoint.manifest import (
    CheckpointManifest,
    TensorRecord,
    weights_hash,
    write_checkpoint_manifest,
)
from titanlite.errors import ConfigError
from titanlite.storage import StorageFolder
from titanlite.training import CheckpointEvaluator, EvaluationConfig, check_evaluation_config
from titanlite_lab.evaluation.run_tasks import load_tasks

# in place of `python -m titanlite_lab.evaluation`: waits for the file "go", does what it says
FAKE = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
while not (out.parent / "go").exists():
    time.sleep(0.02)
if (out.parent / "go").read_text() == "fail":
    print("a traceback"); print("titanlite: out of memory."); print("more"); sys.exit(2)
weights = (out.parent / "weights").read_text()
scores = {"cloze": {"documents": 3, "values": {"acc": 0.5}}}
out.write_text(json.dumps({"tasks": scores, "weights": weights, "seconds": 1.5}))
"""
SCORES = {"name": "cloze", "acc": 0.5, "documents": 3, "seconds": 1.5}


class Bench:
    """An evaluator whose processes run `FAKE`, its folders and its events."""

    def __init__(self, folder: Path, monkeypatch, **settings):
        self.folder, self.results = folder, folder / "evaluation"
        self.results.mkdir(exist_ok=True)
        self.events: list[tuple] = []
        monkeypatch.setattr(
            CheckpointEvaluator, "_command", lambda self: [sys.executable, "-S", "-c", FAKE]
        )
        config = EvaluationConfig(enable=True, freq=10, **settings)
        self.evaluator = CheckpointEvaluator(config, self.results, self.of_step, self)

    def of_step(self, step: int) -> StorageFolder:
        return StorageFolder(self.folder / f"step-{step}")

    def event(self, step, name, /, **fields) -> None:
        self.events.append((step, name, fields))

    def save(self, step: int, weights: str = "first") -> None:
        tensors = {"model.w": TensorRecord([0], "float32", weights)}
        manifest = CheckpointManifest(step, {}, {}, {}, "", {}, 0.0, {}, tensors)
        self.of_step(step).create_folder()
        write_checkpoint_manifest(self.of_step(step), manifest)
        (self.results / "weights").write_text(weights_hash(manifest))

    def finish(self, how: str = "pass") -> None:
        """Let the processes end; at most the rest of the test's time limit."""
        (self.results / "go").write_text(how)
        while self.evaluator.busy:
            self.evaluator.poll(is_saving=False)
            time.sleep(0.02)
        (self.results / "go").unlink()


def test_a_checkpoint_is_evaluated_once_it_is_committed(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    bench.evaluator.add(10)
    bench.evaluator.poll(is_saving=True)  # still being written
    bench.save(10)
    bench.evaluator.poll(is_saving=False)
    bench.finish()
    assert bench.events == [(10, "evaluation", SCORES)]
    bench.evaluator.add(20)  # its save failed
    bench.evaluator.poll(is_saving=False)
    assert not bench.evaluator.busy and len(bench.events) == 1


def test_of_checkpoints_that_wait_the_newest_is_evaluated(tmp_path, monkeypatch):
    """Otherwise evaluations that are slower than the run would fall behind forever."""
    bench = Bench(tmp_path, monkeypatch)
    for step in (10, 20, 30):
        bench.save(step)
        bench.evaluator.add(step)
        bench.evaluator.poll(is_saving=False)
    bench.finish()
    assert [(step, name) for step, name, _ in bench.events] == [
        (10, "evaluation"),
        (30, "evaluation"),
    ]


def test_a_failed_evaluation_is_an_event_with_its_reason(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    bench.save(10)
    bench.evaluator.add(10)
    bench.finish("fail")
    log = str(bench.results / "step-10.log")
    fields = {"reason": "out of memory.", "path": log}
    assert bench.events == [(10, "evaluation_failed", fields)]


def test_an_evaluation_that_hangs_is_ended_after_the_time_limit(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, timeout_seconds=1)
    bench.save(10)
    bench.evaluator.add(10)
    while bench.evaluator.busy:
        bench.evaluator.poll(is_saving=False)
    ((_, name, fields),) = bench.events
    assert name == "evaluation_failed" and "evaluation.timeout_seconds = 1" in fields["reason"]


def test_after_a_restart_a_lost_evaluation_is_repeated_and_a_finished_one_is_not(
    tmp_path, monkeypatch
):
    bench = Bench(tmp_path, monkeypatch)
    bench.save(10)
    bench.evaluator.add(10)
    bench.evaluator.poll(is_saving=False)
    bench.evaluator.stop()  # killed with the run
    restarted = Bench(tmp_path, monkeypatch)
    restarted.evaluator.resume(14)
    restarted.finish()
    assert restarted.events == [(10, "evaluation", SCORES)]
    restarted.evaluator.resume(14)
    assert not restarted.evaluator.busy
    # After a roll-back, step 10 has other weights.
    restarted.save(10, weights="second")
    restarted.evaluator.resume(14)
    assert restarted.evaluator.busy
    restarted.evaluator.resume(9)  # rolled back again, to before that step
    assert not restarted.evaluator.busy


def test_the_settings_are_refused_together():
    config = EvaluationConfig(enable=True, freq=25, tasks=[])
    problems = [
        str(p) for p in check_evaluation_config(config, CheckpointConfig(interval=10), None)
    ]
    expected = ("saves no checkpoints", "data.tokenizer", "Use 20 or 30", "tasks = []")
    assert all(any(text in problem for problem in problems) for text in expected)
    assert not list(check_evaluation_config(EvaluationConfig(), CheckpointConfig(), None))


BACKGROUND = """
import sys, time
from titanlite_lab.evaluation.background import run_in_background
run_in_background()
print("ready", flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
"""


def test_an_evaluation_ends_with_the_run_that_started_it():
    def start(what: str) -> subprocess.Popen:
        command = [sys.executable, "-c", BACKGROUND, what]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)

    with start("wait") as waiting, start("end") as ending:
        assert waiting.stdout.readline() == ending.stdout.readline() == b"ready\n"
        assert ending.wait(60) == 0, ending.stderr.read()  # the thread does not disturb its exit
        waiting.stdin.close()  # as by the kernel, when the other process dies
        try:
            assert waiting.wait(60) == 130
        finally:
            waiting.kill()


def test_a_yaml_file_of_a_task_needs_allow_code(tmp_path):
    (tmp_path / "task").write_text("task: mine\ndoc_to_text: !function mine.run\n")
    for name in ("mine.yaml", str(tmp_path / "task")):
        with pytest.raises(ConfigError, match="a YAML file can run code") as refusal:
            load_tasks(["python", name])
        assert "--allow-code" in refusal.value.fix
