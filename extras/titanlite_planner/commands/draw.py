"""Plot the ranks, stages and pipeline schedule of a job, before it runs.

  python -m titanlite_planner draw RUN.toml --ranks N [--section.key value ...]

Settings override those of the TOML, as for train.py: --parallelism.pipeline_parallel_schedule GPipe
A run with profiling.enable_profiling = true writes traces; --trace adds the times measured in one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, DataError, UserError, format_error
from titanlite.job import Job, read_job
from titanlite_planner.pictures.gantt import PipelineTimeline
from titanlite_planner.pictures.job_layout import computed_timelines, draw_job_layout
from titanlite_planner.pictures.pipeline_trace import read_actions


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="RUN.toml", help="the job; its data need not exist")
    parser.add_argument("--ranks", type=int, required=True, help="number of processes of the job")
    parser.add_argument(
        "--trace", type=Path, help="a folder profile_traces/iteration_N of a run of this job"
    )
    parser.add_argument(
        "--out", type=Path, help="write OUT.png and OUT.svg (default: layout, in job.dump_folder)"
    )
    arguments, overrides = parser.parse_known_args(argv)
    try:
        job = _read_job(arguments.config, arguments.ranks, overrides)
        timelines = computed_timelines(job)
        if arguments.trace is not None:
            timelines.append(_read_trace(job, arguments.trace))
        out = arguments.out or job.folder / "layout"
        files = draw_job_layout(job, timelines, out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    for timeline in timelines:
        print(f"{timeline.name}: idle {timeline.bubble:.1%} of the time")
    print(*files, sep="\n")
    return EXIT_DONE


def _read_job(config: str, ranks: int, overrides: list[str]) -> Job:
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: must be at least 1.")
    argv = ["--job.config_file", config, *overrides, f"--job.check_ranks={ranks}"]
    return read_job(argv, ranks, here=False)


def _read_trace(job: Job, folder: Path) -> PipelineTimeline:
    """The schedule as measured by the first of the ranks that share a pipeline rank."""
    if job.degrees.pipeline == 1:
        raise UserError("--trace: the job has no pipeline to measure.")
    ranks_per_stage = job.degrees.ranks // job.degrees.pipeline
    rows = [
        read_actions(folder / f"rank{pp_rank * ranks_per_stage}_trace.json")
        for pp_rank in range(job.degrees.pipeline)
    ]
    traced = [{timed.action for timed in row} for row in rows]
    if traced != [set(row) for row in job.pipeline.order()]:
        raise DataError(
            f"{folder}: is the trace of a different job, not of {job.pipeline}.",
            fix="Give a trace of this job, with the same overrides.",
        )
    return PipelineTimeline(f"measured, {folder.name}", rows, "s")
