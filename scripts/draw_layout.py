"""Draw who holds what, and when it idles: python scripts/draw_layout.py RUN.toml --ranks N

Settings can be overridden as for train.py: --parallelism.pipeline_parallel_schedule GPipe. A run
with profiling.enable_profiling true leaves traces; --trace adds what was measured in one of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.distributed.mesh import coordinates_of
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, DataError, UserError, format_error
from titanlite.job import Job, read_job
from titanlite.parallelize.schedule import simulate_schedule
from titanlite.plots.layout import (
    DrawnAction,
    DrawnTimeline,
    MeshCoordinate,
    StageCost,
    draw_layout,
)
from titanlite.plots.pipeline_trace import read_actions


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="RUN.toml", help="the job; its data need not be there")
    parser.add_argument("--ranks", type=int, required=True, help="processes it is spread over")
    parser.add_argument(
        "--trace", type=Path, help="a folder profile_traces/iteration_N of a run of this job"
    )
    parser.add_argument(
        "--out", type=Path, help="OUT.png and OUT.svg; layout, in dump_folder, if not given"
    )
    asked, overrides = parser.parse_known_args(argv)
    try:
        if asked.ranks < 1:
            raise UserError(f"--ranks {asked.ranks}: must be at least 1.")
        words = ["--job.config_file", asked.config, *overrides, f"--job.check_ranks={asked.ranks}"]
        job = read_job(words, asked.ranks, check_environment=False)
        timelines = [_computed(job)] if job.degrees.pipeline > 1 else []
        if asked.trace is not None:
            timelines.append(_measured(job, asked.trace))
        out = asked.out or job.folder / "layout"
        places = [MeshCoordinate(n, **coordinates_of(n, job.degrees)) for n in range(asked.ranks)]
        drawn = draw_layout(_title(job), places, _stages(job), timelines, out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    for line in timelines:
        print(f"{line.name}: idle {line.bubble:.1%} of the time")
    print(*drawn, sep="\n")
    return EXIT_DONE


def _title(job: Job) -> str:
    return f"{job.spec.name} {job.config.model.flavor} on {job.degrees.ranks} ranks: {job.degrees}"


def _stages(job: Job) -> list[StageCost]:
    plan = job.pipeline
    return [
        StageCost(number, plan.rank_of[number], plan.describe_stage(number), cost / sum(plan.costs))
        for number, cost in enumerate(plan.costs)
    ]


def _computed(job: Job) -> DrawnTimeline:
    plan = job.pipeline
    average = sum(plan.costs) / len(plan.costs)
    times = simulate_schedule(plan.order(), [cost / average for cost in plan.costs])
    rows = [[DrawnAction(*timed.action, timed.start, timed.end) for timed in row] for row in times]
    return DrawnTimeline(f"{plan}, computed", rows, "forwards of an average stage")


def _measured(job: Job, folder: Path) -> DrawnTimeline:
    if job.degrees.pipeline == 1:
        raise UserError("--trace: the job has no pipeline to measure.")
    apart = job.degrees.ranks // job.degrees.pipeline  # the first rank of each stage
    rows = [
        read_actions(folder / f"rank{number * apart}_trace.json")
        for number in range(job.degrees.pipeline)
    ]
    ran = [{(action.kind, action.stage, action.microbatch) for action in row} for row in rows]
    if ran != [set(row) for row in job.pipeline.order()]:
        raise DataError(
            f"{folder}: is the trace of another job than this one ({job.pipeline}).",
            fix="Give a trace of this job, with the same overrides.",
        )
    return DrawnTimeline(f"measured, {folder.name}", rows, "s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
