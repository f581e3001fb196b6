"""How long a pipeline really idles: measured from traces of stages that sleep, so that the number
of cores does not matter, and held against what the schedule says."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tests.distributed.oracle import FAMILY, SGD, Layout, batch_at, deepened, sharded
from tests.distributed.ranks import run_on_ranks
from titanlite.parallelize.pipeline import plan_pipeline
from titanlite.parallelize.schedule import simulate_schedule
from titanlite.plots.gantt import PipelineTimeline
from titanlite.plots.pipeline_trace import read_actions

RANKS, BLOCK_SECONDS = 4, 0.02
RECIPE = replace(SGD, batch=8, seq_len=24)


class SleepForInput(torch.autograd.Function):
    """Nothing, slowly: forward, and the half of a backward that the stage before waits for."""

    @staticmethod
    def forward(ctx, x, seconds):
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class SleepForWeight(torch.autograd.Function):
    """The half of a backward that nobody waits for."""

    @staticmethod
    def forward(ctx, weight, seconds):
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


def sleeping(block, seconds, x, rope, documents=None, cache=None):
    weight = SleepForWeight.apply(block.attention_norm.weight, seconds)
    return SleepForInput.apply(x, seconds) * weight


def traced(layout, folder) -> None:
    model, _, engine = sharded(layout, deepened(RECIPE, layout))
    for block in model.layers.values():
        block.forward = partial(sleeping, block, BLOCK_SECONDS)
    inputs, labels = batch_at(0, RECIPE)
    engine.forward_backward(inputs, labels, torch.tensor(1.0))  # connections are made once
    torch.distributed.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.forward_backward(inputs, labels, torch.tensor(1.0))
        engine.evaluate(inputs[:1], labels[:1])  # which is no part of it
    profiler.export_chrome_trace(str(Path(folder) / f"{torch.distributed.get_rank()}.json"))


def shares_of_idling(schedule, folder) -> tuple[float, float]:
    """(measured, computed), and that what ran is what was planned."""
    layout = Layout(pipeline=RANKS, schedule=schedule, microbatch=1, less=(0, 0))
    recipe = deepened(RECIPE, layout)
    folder.mkdir()
    run_on_ranks(traced, RANKS, layout, str(folder))
    ran = [read_actions(folder / f"{rank}.json") for rank in range(RANKS)]
    plan, _ = plan_pipeline(layout.section(recipe), FAMILY, recipe.shape, 24, 8)
    order = plan.order()
    assert [[(a.kind, a.stage, a.microbatch) for a in row] for row in ran] == order
    stages = [1.0] * len(plan.stages)  # the ends cost nothing beside blocks that sleep
    times = [
        [DrawnAction(*t.action, t.start, t.end) for t in row]
        for row in simulate_schedule(order, stages)
    ]
    computed = DrawnTimeline("computed", times, "forwards").bubble
    return DrawnTimeline("measured", ran, "s").bubble, computed


def test_a_pipeline_idles_as_computed_and_better_schedules_idle_less(tmp_path):
    measured = {}
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        measured[schedule], computed = shares_of_idling(schedule, tmp_path / schedule)
        print(f"{schedule}: {measured[schedule]:.3f} measured, {computed:.3f} computed")
        if schedule in ("GPipe", "1F1B"):
            assert abs(measured[schedule] - computed) <= 0.15 * computed
    assert measured["Interleaved1F1B"] < measured["1F1B"]
    assert measured["ZBVZeroBubble"] < measured["1F1B"]
