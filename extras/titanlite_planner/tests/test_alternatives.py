"""The recommended layout is the simplest of those that tie, and others trade something for it."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from titanlite.errors import UserError
from titanlite_planner import forked
from titanlite_planner.dry_run.ranks import dry_run
from titanlite_planner.hardware import parse_gpus
from titanlite_planner.memory.estimate import estimate_memory
from titanlite_planner.plan import search
from titanlite_planner.plan.alternatives import OFFLOADS, find_alternatives, unproven_features
from titanlite_planner.plan.files import planned_toml
from titanlite_planner.plan.report import eager_bytes, report_lines
from titanlite_planner.plan.request import PlanArguments, PlanRequest, read_plan_request
from titanlite_planner.plan.search import LayoutSearch


def request_of(model="llama3/8B", gpus="64xH100", batch="256", **changes) -> PlanRequest:
    given = {"seq_len": "8192", **changes}
    arguments = PlanArguments(model=model, gpus=gpus, global_batch=batch, **given)
    return read_plan_request(arguments)


def alternatives_of(request: PlanRequest):
    return find_alternatives(LayoutSearch(request.space, request.target, 1))


def test_the_simplest_of_the_ties_is_recommended_and_others_are_really_different(
    monkeypatch, capsys
):
    monkeypatch.setattr(search, "PROGRESS_SECONDS", 0.0)
    request = request_of(overrides=["--attention.backend", "flash"])  # with which CP is a tie
    layouts = alternatives_of(request)
    assert "time estimates" in capsys.readouterr().err
    first, *others = layouts
    assert str(first.step.choice.frame.degrees) == "FSDP 64"
    assert {"the best without CP", "the best without offload"} < set(first.labels)
    fastest = others[0]
    assert fastest.labels == ["the fastest"]
    assert first.step.time.total <= 1.03 * fastest.step.time.total
    unproven = ["CP with 1,024 tokens a rank", "recompute pointwise"]
    assert unproven_features(fastest.step.choice, 8192) == unproven
    # the local batch is written though it is the default
    assert "local_batch_size = 16" in planned_toml(request, fastest.step, Path("run.toml"))
    names = [str(layout.step.choice.frame.degrees) for layout in others[1:]]
    assert names == ["FSDP 32 x TP 2", "PP 2 x FSDP 32"]
    text = list(report_lines(request, search.SearchCounts(), layouts, []))
    assert any("faster than layout 1: less than the error" in line for line in text)
    assert not any(line.endswith(" s") and "less than" in line for line in text)
    assert f"    in no published run: {', '.join(unproven)}" in text
    assert "error: dense bf16 on H100: median 3.6%, 98% within 20% of 41 published runs" in text
    stored = (
        "  activations: a block stores 94,344 bytes a token; recomputation adds 0.0% to the FLOPs"
    )
    assert any(line.startswith(stored) for line in text)
    assert first.step.memory.total / 2**30 == pytest.approx(67.2, abs=0.1)


def test_offload_is_recommended_only_if_nothing_else_is_as_fast():
    fast = alternatives_of(request_of("llama3/1B", "1xH100", "8", seq_len="2048"))
    assert not any(unproven_features(layout.step.choice, 2048) for layout in fast[:1])
    forced = request_of("llama3/1B", "1xH100", "8", seq_len="2048", fix=["offload_optimizer=yes"])
    (layout, *_) = alternatives_of(forced)
    assert unproven_features(layout.step.choice, 2048) == ["optimizer offload"]


@pytest.mark.slow
def test_a_trusted_plan_has_only_what_published_runs_have_and_no_layout_twice(monkeypatch):
    asked, among = [], LayoutSearch.among

    def recorded(self, frames, fixed, *limit):
        asked.append(fixed)
        return among(self, frames, fixed, *limit)

    monkeypatch.setattr(LayoutSearch, "among", recorded)
    for gpus in ("32", "64"):
        request = request_of("llama3/70B", f"{gpus}xH100", gpus, trusted=True)
        layouts = alternatives_of(request)
        assert not any(unproven_features(layout.step.choice, 8192) for layout in layouts)
    assert not any(fixed.get(name) for fixed in asked for name in OFFLOADS)
    choices = [layout.step.choice for layout in layouts]
    assert len(set(choices)) == len(choices) == 3
    names = ["the best without CP", "the best with TP, without CP, PP or offload"]
    assert layouts[1].labels == names
    # the simplest within 3 % is first, and says why
    text = list(report_lines(request, search.SearchCounts(), layouts, []))
    assert text[7].strip().startswith("recommended: the simplest within 3% of the fastest")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "advice"),
    [
        ("llama3/70B", "1xH100", "256", "The smallest number of GPUs that fits: 8."),
        ("llama3/405B", "100000xH100", "2048", "Numbers of GPUs with a layout: 98,304, 131,072."),
    ],
)
def test_numbers_of_gpus_that_work_are_named(model, gpus, batch, advice):
    with pytest.raises(UserError) as refused:
        alternatives_of(request_of(model, gpus, batch))
    assert advice in refused.value.fix
    if "fits" in advice:  # and with fewer, it does not
        with pytest.raises(UserError, match="Nothing fits"):
            alternatives_of(request_of(model, "7xH100", "1"))


@pytest.mark.slow
@pytest.mark.parametrize("fix", [["pipeline=1"], ["pipeline=2", "tensor=2"]], ids=str)
def test_the_eager_memory_of_a_plan_is_that_of_its_dry_run(fix):
    """A plan is compiled and a dry run is not: that explains the whole difference."""
    small = ["--model.n_layers", "4", "--model.vocab_size", "2048"]
    fixed = [*fix, "recompute=none", "offload_activations=no", "offload_optimizer=no"]
    request = request_of(
        "llama3/debugmodel", "4xH100", "16", seq_len="512", overrides=small, fix=fixed
    )
    step = alternatives_of(request)[0].step
    worst = max(rank.peak_bytes for rank in dry_run(step.job))
    assert eager_bytes(step) == pytest.approx(worst, rel=0.04)
    assert step.memory.total < 0.95 * worst
    eager = dataclasses.replace(step.workload, compiled=False)
    assert estimate_memory(eager).total == eager_bytes(step)


def test_a_gpu_may_have_its_full_name():
    for name in ("RTX4090", "rtx-4090", "NVIDIA-RTX4090", "4090"):
        assert parse_gpus(f"2x{name}").gpu.name == "4090"


def test_what_runs_in_processes_reports_that_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(forked, "PROGRESS_SECONDS", 0.01)
    assert list(forked.run_in_processes([lambda: time.sleep(0.3)], 1)) == [None]
    assert "0 of 1 parts done" in capsys.readouterr().err
