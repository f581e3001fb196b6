"""The average of the weights is that of a plain loop over the weights of all steps."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from conftest import ROOT
from tests.checkpoint.saving import open_checkpointer
from tests.distributed.oracle import (
    SGD,
    Layout,
    Record,
    merge_parts,
    run_until,
    shard_and_offset,
    start_run,
    with_enough_blocks,
    with_tied_embeddings,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.checkpoint import SaveRequest
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.errors import CheckpointError
from titanlite.storage import StorageFolder
from titanlite.training.state import Counters
from titanlite.training.step import StepResult
from titanlite.training.weight_average import PART, WeightAverage, WeightAverageConfig
from titanlite_lab.checkpoints import average_checkpoints

CONFIG = WeightAverageConfig(decay=0.7, start_step=1)  # the third average is no mean any more
PIPELINE = Layout(pipeline=2, shard=2, microbatch=3, schedule="Interleaved1F1B")
RECIPE = with_enough_blocks(replace(with_tied_embeddings(SGD), batch=12), PIPELINE)
STOP = 3  # steps of the first run


def train(layout: Layout, folder: str, resume: bool) -> tuple[list, dict, float]:
    """(weights after each step, the average) of a run that saves or resumes, and its validation."""
    state, engine, mesh = start_run(layout, RECIPE)
    average = WeightAverage(state.model, CONFIG, state.counters)
    state.parts[PART] = average
    model = {"name": "llama3", "flavor": "debugmodel", **asdict(RECIPE.sizes)}
    checkpointer = open_checkpointer(folder, job={"model": model})
    if resume:
        progress = checkpointer.load(
            checkpointer.find(), state.model, state.optimizer, {}, average=average.tensors
        )
        state.restore(progress)
    weights = []
    for step in range(state.step, state.step + STOP):
        record = Record()
        run_until(state, engine, mesh, RECIPE, record, step + 1)
        weights.append(record.weights)
    if not resume:
        parts = (state.step, state.model, state.optimizer, state.progress())
        checkpointer.save(SaveRequest(*parts, average=average.current()))
        assert not checkpointer.wait().problem
    return weights, {name: shard_and_offset(value) for name, value in average.tensors.items()}


def expected_average(steps: list[dict]) -> dict:
    """In fp64, of the weights after each step but those before `CONFIG.start_step`."""
    averages = {}
    for number, weights in enumerate(steps[CONFIG.start_step :], start=1):
        share = max(1 - CONFIG.decay, 1 / number)
        for name, weight in weights.items():
            old = averages.get(name, torch.zeros_like(weight).double())
            averages[name] = old + share * (weight.double() - old)
    return averages


def merge(results) -> tuple[list[dict], dict]:
    steps = [merge_parts(parts) for parts in zip(*(steps for steps, _ in results), strict=True)]
    return steps, merge_parts([average for _, average in results])


def read(folder: StorageFolder, name: str, like: torch.Tensor) -> torch.Tensor:
    """A weight of a checkpoint."""
    tensor = torch.empty_like(like)
    read_tensors(folder, {"model": {name: tensor}}, no_dist=True)
    return tensor


def assert_is_average(average: dict, steps: list[dict]) -> None:
    expected = expected_average(steps)
    assert average.keys() - expected.keys() <= {"output.weight"}  # tied: its second name
    for name, value in average.items():
        wanted = expected.get(name, expected["tok_embeddings.weight"])
        assert torch.allclose(value.double(), wanted, rtol=1e-5, atol=1e-7), name


def test_every_layout_has_the_average_of_a_plain_loop_also_resumed_under_another(tmp_path):
    saved = Layout(shard=2, tensor=2)
    steps, average = merge(run_on_ranks(train, 4, saved, str(tmp_path), False))
    assert_is_average(average, steps)
    checkpoint = StorageFolder(tmp_path) / f"step-{STOP}"
    alone, both = StorageFolder(tmp_path / "alone"), StorageFolder(tmp_path / "both")
    average_checkpoints([checkpoint], alone)
    average_checkpoints([checkpoint, alone], both)
    for name, value in average.items():
        assert torch.equal(read(alone, name, value), value)
        weight = steps[-1].get(name, steps[-1]["tok_embeddings.weight"])
        mean = (weight.double() + value.double()) / 2
        assert torch.equal(read(both, name, value), mean.float())
    with pytest.raises(CheckpointError, match="has no average of the weights"):
        average_checkpoints([alone], StorageFolder(tmp_path / "none"))
    for layout in (PIPELINE, Layout(context=2, offload=True), Layout()):
        results = run_on_ranks(train, layout.degrees.ranks, layout, str(tmp_path), True)
        later, average = merge(results)
        assert_is_average(average, steps + later)


def test_a_job_validates_the_average_and_averages_what_balances_its_experts(python, run_toml):
    argv = ["--job.config_file", str(run_toml), "--model.name", "deepseek_v3"]
    argv += ["--model.flavor", "tiny", "--model.expert_hidden_dim", "16", "--training.steps", "1"]
    argv += ["--weight_average.decay", "0.9", "--weight_average.validate", "true"]
    argv += ["--checkpoint.enable", "true", "--lr_scheduler.warmup_steps", "0"]
    text = run_toml.read_text("utf-8").replace("n_kv_heads = 2\n", "")  # it has none
    run_toml.write_text(text, "utf-8")
    subprocess.run([python, "train.py", *argv], check=True, cwd=ROOT, capture_output=True)
    out = run_toml.parent / "out"
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    of_average, of_weights = (
        [event["loss"] for event in events if event.get("event") == name]
        for name in ("validation_average", "validation")
    )
    assert of_average == of_weights and len(of_weights) == 1  # the average of one step
    checkpoint, bias = StorageFolder(out / "checkpoint/step-1"), "layers.1.moe.router.expert_bias"
    average, weight = torch.empty(8), torch.empty(8)
    state = {"average": {bias: average}, "model": {bias: weight}}
    read_tensors(checkpoint, state, no_dist=True)
    assert weight.any() and torch.equal(average, weight)


def result_of(accept: bool | None) -> StepResult:
    """A step, of which the average reads only `accept`."""
    one = torch.ones(())
    flag = None if accept is None else torch.tensor(accept)
    return StepResult(one, one, one, one, None, one, 0.0, 1, 1, accept=flag)


def test_the_average_leaves_out_rejected_steps_and_changes_no_weight():
    model, counters = nn.Linear(3, 2).bfloat16(), Counters()
    average = WeightAverage(model, WeightAverageConfig(decay=1.0, freq=2), counters)
    before = model.weight.detach().clone()
    assert torch.equal(average.current()["weight"], before.float())
    values = []
    for accept in (None, True, None, False, None, True):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.after_update(result_of(accept))
        counters.advance(1, 1)
        if counters.step in (2, 6):  # every second step; the fourth was rejected
            values.append(model.weight.detach().float())
    state = average.state()
    assert state["steps"] == 2
    mean = torch.stack(values).mean(0)
    assert torch.allclose(average.tensors["weight"], mean)
    weight = model.weight.detach().clone()
    with average.in_use():
        assert torch.equal(model.weight, mean.bfloat16())
    assert torch.equal(model.weight, weight)
    for wrong in (-1, "2", True):
        with pytest.raises(ValueError, match="must be a number of steps"):
            average.restore({**state, "steps": wrong})
    average.restore(state)
    assert average.state()["steps"] == 2
    other = WeightAverage(model, WeightAverageConfig(decay=0.9), counters)
    other.restore(state)  # of another kind: the average begins again
    assert other.state()["steps"] == 0
