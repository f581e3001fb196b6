"""The plot of a job's layout: its ranks, its stages, and the computed schedule of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlite.distributed.mesh import coordinates_of
from titanlite.job import Job
from titanlite_planner.pictures.gantt import PipelineTimeline
from titanlite_planner.pictures.layout import MeshCoordinate, StageCost, draw_layout
from titanlite_planner.stages import describe_stage
from titanlite_planner.time.simulation import simulate_schedule, with_whole_backwards


def draw_job_layout(job: Job, timelines: Sequence[PipelineTimeline], out: Path) -> list[Path]:
    """Write `out`.png and `out`.svg; raises as `draw_layout`."""
    ranks = range(job.degrees.ranks)
    coordinates = [MeshCoordinate(n, **coordinates_of(n, job.degrees)) for n in ranks]
    title = f"{job.spec.name} {job.config.model.flavor} on {len(ranks)} ranks: {job.degrees}"
    return draw_layout(title, coordinates, _stage_costs(job), timelines, out)


def computed_timelines(job: Job) -> list[PipelineTimeline]:
    """The schedule with the computed costs of the stages; [] without a pipeline.

    Communication takes no time in it.
    """
    if job.degrees.pipeline == 1:
        return []
    plan, costs = job.pipeline, _stage_flops(job)
    average = sum(costs) / len(costs)
    order = plan.order()
    order = order if job.transforms.splits_backward else with_whole_backwards(order)
    rows = simulate_schedule(order, [cost / average for cost in costs])
    return [PipelineTimeline(f"{plan}, computed", rows, "forwards of an average stage")]


def _stage_costs(job: Job) -> list[StageCost]:
    plan, costs = job.pipeline, _stage_flops(job)
    return [
        StageCost(stage, plan.rank_of[stage], describe_stage(plan.stages[stage]), cost / sum(costs))
        for stage, cost in enumerate(costs)
    ]


def _stage_flops(job: Job) -> list[float]:
    """FLOPs per token of each stage."""
    flops = job.spec.module_flops(job.sizes, job.config.training.seq_len)
    return [sum(flops[name] for name in names) for names in job.pipeline.stages]
