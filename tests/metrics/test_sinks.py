"""Records reach every sink once, and the files stay readable."""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titanlite.log import logger
from titanlite.metrics import (
    SINKS,
    MetricsConfig,
    MetricSinks,
    SinkContext,
    ThroughputMeter,
    check_metrics_config,
    metrics_folder,
    open_sinks,
)
from titanlite.metrics.jsonl import REPLACED_FILE
from titanlite.training.periodic import log_metrics
from titanlite.training.state import Counters

ROOT = str(Path(__file__).parents[2])
STEP = {
    "step": 1,
    "loss": 4.2113,
    "z_loss": 0.0071,
    "grad_norm": 0.814,
    "lr": 3e-4,
    "tokens": 4096,
    "samples": 8,
    "loss_scale": 1024.0,
    "tokens_per_second": 5912.4,
    "tokens_per_second_per_device": 2956.2,
    "tflops_per_device": 0.1,
    "mfu": 0.312,
    "step_seconds": 0.5,
    "data_seconds": 0.01,
    "peak_memory_gib": 1.5,
}


def read_records(folder) -> list[dict]:
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def open_in(folder, completed_steps=0, rollbacks=0, **config):
    context = SinkContext(
        MetricsConfig(**config),
        folder,
        total_steps=400,
        completed_steps=completed_steps,
        rollbacks=rollbacks,
        job={"training": {"steps": 400}},
    )
    return open_sinks(context)


@pytest.fixture
def logged():
    """A function that returns the logged lines."""
    stream = io.StringIO()
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: stream.getvalue().splitlines()
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_step_line_has_the_promised_keys_and_depths_are_an_event_behind_it(tmp_path):
    state = SimpleNamespace(counters=Counters(1, 8, 4096), loss_scale=None)
    meter = ThroughputMeter(
        flops_per_token=1.0, peak_flops=None, devices=1, device=torch.device("cpu")
    )
    tensors = dict.fromkeys(("loss", "z_loss", "grad_norm"), torch.ones(()))
    result = SimpleNamespace(lr=3e-4, mtp_losses=torch.tensor([2.0, 3.0]), **tensors)
    with open_in(tmp_path) as sinks:
        log_metrics(state, meter, sinks, 1).run(SimpleNamespace(step=1, result=result))
    line, depths = read_records(tmp_path)
    assert list(line) == [*STEP, "time"] and line["time"] > 1.6e9
    assert (depths["event"], depths["depth_1"], depths["depth_2"]) == ("mtp_losses", 2.0, 3.0)


KILLED = """
import os, pathlib, signal
from titanlite.metrics import MetricsConfig, SinkContext, open_sinks
config, folder = MetricsConfig(enable_tensorboard=True), pathlib.Path({folder!r})
sinks = open_sinks(SinkContext(config, folder, 400, completed_steps=0, job={{}}))
sinks.step({step!r})
sinks.event(1, "validation", name="code", loss=4.0, perplexity=54.6)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_kill_loses_no_record(tmp_path):
    script = KILLED.format(folder=str(tmp_path), step=STEP)
    run = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": ROOT})
    assert run.returncode == -signal.SIGKILL
    step, event = read_records(tmp_path)
    assert step["loss"] == STEP["loss"]
    assert list(event) == ["event", "step", "name", "loss", "perplexity", "time"]
    assert read_tensorboard(tmp_path / "tb")["validation/code/loss"] == [(1, 4.0)]


def test_after_a_resume_no_step_or_event_is_recorded_twice(tmp_path, logged):
    with open_in(tmp_path) as sinks:
        for step in (1, 10, 20, 30):
            sinks.step({**STEP, "step": step})
            sinks.event(step, "validation", name="code", loss=4.0, perplexity=54.6)
    with open_in(tmp_path, completed_steps=20) as sinks:
        sinks.event(20, "resumed", path="step-20")
        sinks.step({**STEP, "step": 30, "loss": 1.0})
    steps = [line["step"] for line in read_records(tmp_path) if "event" not in line]
    assert steps == [1, 10, 20, 30]
    assert read_records(tmp_path)[-1]["loss"] == 1.0
    assert [line["event"] for line in read_records(tmp_path) if "event" in line] == [
        *["validation"] * 3,
        "resumed",
    ]
    assert any("2 lines, after step 20 or incomplete, moved to" in line for line in logged())
    replaced = [json.loads(line) for line in (tmp_path / REPLACED_FILE).open()]
    assert [line["step"] for line in replaced] == [30, 30]  # moved, not lost
    assert {place.name for place in tmp_path.iterdir()} == {"metrics.jsonl", REPLACED_FILE}


def roll_back(sinks, number: int, from_step: int, step: int) -> None:
    sinks.roll_back(step, rollbacks=number - 1)
    sinks.event(step, "rolled_back", number=number, from_step=from_step)


def test_a_roll_back_moves_what_is_repeated_and_keeps_the_events_of_all_roll_backs(tmp_path):
    with open_in(tmp_path) as sinks:
        for step in (10, 20, 30):
            sinks.step({**STEP, "step": step})
        roll_back(sinks, 1, from_step=31, step=20)
        sinks.step({**STEP, "step": 30})
        roll_back(sinks, 2, from_step=31, step=10)
        sinks.step({**STEP, "step": 20})
    records = [(line.get("number"), line["step"]) for line in read_records(tmp_path)]
    assert records == [(None, 10), (1, 20), (2, 10), (None, 20)]
    replaced = [json.loads(line)["step"] for line in (tmp_path / REPLACED_FILE).open()]
    assert replaced == [30, 20, 30]


def test_a_full_disk_in_a_roll_back_does_not_end_the_records(tmp_path):
    with open_in(tmp_path) as sinks:
        for step in (10, 20):
            sinks.step({**STEP, "step": step})
        (tmp_path / REPLACED_FILE).mkdir()  # cannot be written, like a file on a full disk
        roll_back(sinks, 1, from_step=21, step=10)
        sinks.sync()
        (tmp_path / REPLACED_FILE).rmdir()
        sinks.step({**STEP, "step": 30})
    assert [line["step"] for line in read_records(tmp_path)] == [10, 30]


@pytest.mark.parametrize("known", [0, 1, 2])
def test_a_resume_from_before_a_roll_back_drops_its_event_because_it_is_repeated(known, tmp_path):
    with open_in(tmp_path) as sinks:
        sinks.step({**STEP, "step": 10})
        roll_back(sinks, 1, from_step=12, step=10)
        roll_back(sinks, 2, from_step=11, step=10)
    with open_in(tmp_path, completed_steps=10, rollbacks=known):
        pass
    numbers = [line["number"] for line in read_records(tmp_path) if "event" in line]
    assert numbers == list(range(1, known + 1))


def test_a_run_without_checkpoints_does_not_replace_the_records_of_a_run_with_them(tmp_path):
    assert metrics_folder(tmp_path, saves=False) == tmp_path  # there are none
    with open_in(tmp_path) as sinks:
        sinks.step(STEP)
    assert metrics_folder(tmp_path, saves=False) == tmp_path
    with open_in(tmp_path, completed_steps=1) as sinks:
        sinks.event(1, "checkpoint_saved", path="step-1")
    assert metrics_folder(tmp_path, saves=True) == tmp_path
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open_in(metrics_folder(tmp_path, saves=False)) as sinks:
        sinks.step(STEP)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [line["step"] for line in read_records(tmp_path / "unsaved")] == [1]


def test_sync_flushes_the_records_to_the_disk(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), sync(fd)))
    with open_in(tmp_path) as sinks:
        sinks.step(STEP)
        sinks.sync()
    assert synced == [os.stat(tmp_path / "metrics.jsonl").st_ino]


@pytest.mark.parametrize("incomplete", ['{"step": 2, "lo', '{"step": 1}', "\0\0\0\n", "[]\n"])
def test_an_incomplete_line_after_a_kill_does_not_corrupt_the_file(tmp_path, incomplete):
    with open_in(tmp_path) as sinks:
        sinks.step(STEP)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(incomplete)
    with open_in(tmp_path, completed_steps=1) as sinks:
        sinks.step({**STEP, "step": 2})
    assert [line["step"] for line in read_records(tmp_path)] == [1, 2]


def test_a_full_disk_loses_records_but_not_the_run_or_the_file(tmp_path, logged):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_in(tmp_path) as sinks:
        sinks.step(STEP)
        size = os.path.getsize(tmp_path / "metrics.jsonl")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, unlimited[1]))
        try:
            sinks.step({**STEP, "step": 2})
            sinks.step({**STEP, "step": 3})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        sinks.step({**STEP, "step": 4})
    assert [line["step"] for line in read_records(tmp_path)] == [1, 4]
    text = " ".join(logged())
    assert text.count("records are being dropped") == 1 and text.count("writing again") == 1


def test_inf_and_nan_are_written_as_null(tmp_path):
    with open_in(tmp_path) as sinks:
        sinks.step({**STEP, "loss": float("nan"), "grad_norm": float("inf")})
        sinks.event(1, "validation", name="code", loss=800.0, perplexity=float("inf"))
    step, event = read_records(tmp_path)
    assert step["loss"] is step["grad_norm"] is event["perplexity"] is None
    assert event["loss"] == 800.0


def test_without_a_terminal_every_record_is_one_log_line(tmp_path, logged):
    with open_in(tmp_path) as sinks:
        sinks.step({**STEP, "step": 120})
        sinks.step({**STEP, "step": 130, "mfu": None})
        sinks.event(130, "validation", name="code", loss=4.0, perplexity=54.6, bits_per_byte=1.5)
        sinks.event(130, "validation", name="ids", loss=4.0, perplexity=54.6, bits_per_byte=None)
        sinks.event(130, "checkpoint_saved", path="outputs/checkpoint/step-130")
    values = "loss 4.2113  z_loss 0.0071  grad_norm 0.81  lr 3.0e-04"
    assert logged() == [
        f"step 120/400  {values}  5,912 tok/s  2,956 tok/s/device  1.5 GiB  mfu 31.2%  eta 2:23",
        f"step 130/400  {values}  5,912 tok/s  2,956 tok/s/device  1.5 GiB  eta 0:00",
        "step 130/400  validation  code  loss 4.0000  perplexity 54.6000  bits_per_byte 1.5000",
        "step 130/400  validation  ids  loss 4.0000  perplexity 54.6000",
        "step 130/400  checkpoint saved  outputs/checkpoint/step-130",
    ]


def test_a_sink_that_does_not_close_is_abandoned_and_the_others_are_closed(
    tmp_path, monkeypatch, caplog
):
    """For example a W&B run whose service does not answer."""
    monkeypatch.setattr("titanlite.metrics.sinks.CLOSE_SECONDS", 0.1)
    sinks = open_in(tmp_path)

    class Endless:
        def close(self):
            threading.Event().wait()

    sinks.sinks.append(Endless())
    jsonl = sinks.sinks[0]
    monkeypatch.setattr(logger, "propagate", True)
    sinks.close()
    assert "Endless: not closed after 0.1 s" in caplog.text
    assert jsonl.file.closed and not sinks.sinks


def test_the_meters_are_scalars_and_layer_norms_are_not_on_the_console(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO")
    with open_in(tmp_path, enable_tensorboard=True) as sinks:
        norms = {
            kind: {"layers.0": 1.5, "output": 2.5} for kind in ("gradient", "weight", "update")
        }
        sinks.event(3, "layer_norms", **norms)
        noise = {"critical_batch": None, "critical_batch_tokens": None, "noise": 4.5}
        sinks.event(4, "noise_scale", **noise, reason="too few measurements")
        sinks.event(5, "preferences", accuracy=1.0)
        sinks.event(5, "rollout", reward=0.5)
    shown = read_tensorboard(tmp_path / "tb")
    assert set(shown) == {
        "noise_scale/noise",
        "preferences/accuracy",
        "rollout/reward",
        *(f"layer_norms/{kind}/{layer}" for kind in norms for layer in ("layers.0", "output")),
    }
    assert shown["layer_norms/update/output"] == [(3, 2.5)]
    assert "noise scale" in caplog.text and "layer" not in caplog.text


def read_tensorboard(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in names}


def test_tensorboard_shows_every_record_and_no_step_twice_after_a_resume(tmp_path):
    sinks = open_in(tmp_path, enable_tensorboard=True)
    for step in (10, 20, 30):
        sinks.step({**STEP, "step": step})
        measured = {"loss": 4.0, "perplexity": 54.6, "bits_per_byte": 1.5}
        sinks.event(step, "validation", name="code", **measured)
    sinks.close()
    shown = read_tensorboard(tmp_path / "tb")
    of_validation = {f"validation/code/{key}" for key in measured}
    groups = {"train", "speed", "memory", "validation"}
    assert {name.partition("/")[0] for name in shown} == groups
    of_steps = {name.rpartition("/")[2] for name in shown.keys() - of_validation}
    assert of_steps == STEP.keys() - {"step"} and of_validation < shown.keys()
    assert shown["train/loss"] == [(step, pytest.approx(4.2113)) for step in (10, 20, 30)]

    with open_in(tmp_path, completed_steps=20, enable_tensorboard=True) as sinks:
        sinks.step({**STEP, "step": 30, "loss": 1.0})
    assert read_tensorboard(tmp_path / "tb")["train/loss"] == [
        (10, pytest.approx(4.2113)),
        (20, pytest.approx(4.2113)),
        (30, pytest.approx(1.0)),
    ]
    assert read_tensorboard(tmp_path / "tb")["validation/code/loss"] == [(10, 4.0), (20, 4.0)]


def test_tensorboard_shows_no_step_twice_after_a_roll_back(tmp_path):
    with open_in(tmp_path, enable_tensorboard=True) as sinks:
        for step in (10, 20, 30):
            sinks.step({**STEP, "step": step, "loss": 2.0})
        roll_back(sinks, 1, from_step=31, step=10)
        sinks.step({**STEP, "step": 20, "loss": 1.0})
    shown = read_tensorboard(tmp_path / "tb")
    assert shown["train/loss"] == [(10, 2.0), (20, 1.0)]
    assert shown["rollback/from_step"] == [(10, 31.0)]


def test_a_missing_wandb_is_refused_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    (problem,) = check_metrics_config(MetricsConfig(enable_wandb=True))
    message = "metrics.enable_wandb = true, but wandb is not installed."
    assert str(problem) == f"{message} pip install 'titanlite[wandb]'"


def test_a_folder_called_wandb_is_not_mistaken_for_the_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert list(check_metrics_config(MetricsConfig(enable_wandb=True)))


def install_wandb(monkeypatch, log=lambda values, step: None, **functions) -> None:
    """A package "wandb" whose `init` returns a run with `log` and `finish`."""
    package = types.ModuleType("wandb")
    run = types.SimpleNamespace(log=log, finish=functions.get("finish", lambda: None))
    package.init = lambda **settings: (functions.get("init", dict)(**settings), run)[1]
    monkeypatch.setitem(sys.modules, "wandb", package)


def test_wandb_receives_the_settings_and_every_record(tmp_path, monkeypatch):
    sent, started = [], {}
    install_wandb(
        monkeypatch,
        lambda values, step: sent.append((step, values)),
        finish=lambda: sent.append("finished"),
        init=started.update,
    )
    with open_in(tmp_path, enable_wandb=True) as sinks:
        sinks.step(STEP)
        sinks.event(1, "validation", name="code", loss=4.0, perplexity=54.6)
        sinks.step({**STEP, "step": 9})
        sinks.event(1, "checkpoint_saved", path="step-1")
    assert started["config"] == {"training": {"steps": 400}}
    assert sent[0][0] == 1 and sent[0][1]["train/loss"] == STEP["loss"]
    assert {name.rpartition("/")[2] for name in sent[0][1]} == STEP.keys() - {"step"}
    measured = {"validation/code/loss": 4.0, "validation/code/perplexity": 54.6}
    assert sent[1] == (1, measured) and sent[3:] == ["finished"]


def test_wandb_keeps_the_roll_back(tmp_path, monkeypatch):
    kept = []

    def log(values, step):  # W&B drops what is of an earlier step than its last one
        if step >= max((known for known, _ in kept), default=0):
            kept.append((step, values))

    install_wandb(monkeypatch, log)
    with open_in(tmp_path, enable_wandb=True) as sinks:
        sinks.step({**STEP, "step": 9})
        sinks.roll_back(5, 0)
        sinks.event(5, "rolled_back", number=1, from_step=9)
        sinks.step({**STEP, "step": 6})
    assert kept[1:] == [(9, {"rollback/from_step": 9})]


@pytest.mark.parametrize("fails_in", ["init", "log", "finish"])
def test_a_failing_service_loses_only_its_own_records(tmp_path, monkeypatch, logged, fails_in):
    class CommError(Exception):  # like wandb's errors, not an OSError
        pass

    def fail(*_, **__):
        raise CommError("the service is down")

    install_wandb(monkeypatch, **{fails_in: fail})
    with open_in(tmp_path, enable_wandb=True) as sinks:
        sinks.step(STEP)
        sinks.step({**STEP, "step": 2})
    assert [line["step"] for line in read_records(tmp_path)] == [1, 2]
    assert sum("the service is down" in line for line in logged()) == 1


def test_other_ranks_log_and_write_nothing(logged):
    with MetricSinks() as sinks:
        sinks.step(STEP)
        sinks.event(1, "resumed", path="step-1")
    assert logged() == []


def test_a_new_sink_is_one_class_and_one_line(tmp_path, monkeypatch):
    records: list[dict] = []

    class Sink:
        step = event = staticmethod(records.append)

        def __init__(self, run):
            records.append({"completed": run.completed_steps})

        def close(self) -> None:
            records.append({"closed": True})

    monkeypatch.setitem(SINKS, "counting", Sink)
    monkeypatch.setitem(SINKS, "disabled", lambda run: None)
    with open_in(tmp_path, completed_steps=3) as sinks:
        sinks.step(STEP)
        sinks.event(4, "checkpoint_saved", path="step-4")
    first, step, event, last = records
    assert (first, step["step"], event["step"]) == ({"completed": 3}, 1, 4)
    assert last == {"closed": True}
