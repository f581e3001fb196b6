"""Each pipeline rank runs the actions of its schedule in the planned order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile

from tests.distributed.oracle import (
    FAMILY,
    SGD,
    Layout,
    batch_at,
    build_sharded,
    with_enough_blocks,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite_planner.pictures.pipeline_trace import read_actions

RANKS = 4
RECIPE = replace(SGD, batch=8, seq_len=24)


def trace_step(layout: Layout, folder: str) -> None:
    """Write this rank's trace of one training step and one evaluation."""
    _, _, engine = build_sharded(layout, with_enough_blocks(RECIPE, layout))
    inputs, labels = batch_at(0, RECIPE)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.forward_backward(engine.prepare(inputs, labels), torch.tensor(1.0))
        engine.evaluate(inputs[:1], labels[:1])  # must not be read as part of the step
    profiler.export_chrome_trace(str(Path(folder) / f"{torch.distributed.get_rank()}.json"))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_every_rank_runs_its_actions_in_the_planned_order(schedule, tmp_path):
    layout = Layout(pipeline=RANKS, schedule=schedule, microbatch=1, less=(0, 0))
    recipe = with_enough_blocks(RECIPE, layout)
    config = layout.section(recipe)
    plan, _ = plan_pipeline(config, FAMILY, recipe.sizes, recipe.seq_len, recipe.batch)
    assert plan is not None
    run_on_ranks(trace_step, RANKS, layout, str(tmp_path))
    traced = [read_actions(tmp_path / f"{rank}.json") for rank in range(RANKS)]
    assert [[timed.action for timed in actions] for actions in traced] == plan.order()


def first_events(layout: Layout) -> list[str]:
    """All-reduces over the pipeline ranks, and forwards of stages, of a start and three runs."""
    events: list[str] = []
    all_reduce, forward = dist.all_reduce, PipelineStage.forward_one_chunk

    def recorded_all_reduce(tensor, *args, group=None, **options):
        # Integers are torch's own agreement on shapes, before each new schedule since 2.15.
        if tensor.is_floating_point() and dist.get_world_size(group) == layout.pipeline:
            events.append("all-reduce")
        return all_reduce(tensor, *args, group=group, **options)

    def recorded_forward(stage, *args, **options):
        events.append("forward")
        return forward(stage, *args, **options)

    dist.all_reduce, PipelineStage.forward_one_chunk = recorded_all_reduce, recorded_forward
    _, _, engine = build_sharded(layout, with_enough_blocks(RECIPE, layout))
    inputs, labels = batch_at(0, RECIPE)
    for _ in range(2):
        engine.forward_backward(engine.prepare(inputs, labels), torch.tensor(1.0))
    engine.evaluate(inputs, labels)
    return events


def test_pipeline_ranks_are_connected_once_before_the_first_micro_batch():
    """Else NCCL would connect them in the middle of the first 1F1B step."""
    layout = Layout(pipeline=2, microbatch=4)
    for events in run_on_ranks(first_events, 2, layout):
        assert events == ["all-reduce"] + ["forward"] * 6
