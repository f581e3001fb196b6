"""The planner's draw plots a TOML whose data need not exist, and a trace of the job."""

from __future__ import annotations

import json
import subprocess

import pytest

from conftest import HANG_SECONDS
from titanlite.parallelize.schedule import format_trace_name
from titanlite_planner.commands import draw as draw_command

pytestmark = pytest.mark.slow

PIPELINE = ["--parallelism.pipeline_parallel_degree", "2", "--training.local_batch_size", "2"]


def draw(python: str, *argv) -> subprocess.CompletedProcess:
    command = [python, "-m", "titanlite_planner", "draw", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


def write_trace(path, actions) -> None:
    """Write the trace of a rank: (kind, stage, micro-batch, start, end), in milliseconds."""
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": format_trace_name("pipeline", kind, stage, microbatch),
            "ts": 1000 * start,
            "dur": 1000 * (end - start),
        }
        for kind, stage, microbatch, start, end in actions
    ]
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**18}))


def test_a_layout_is_drawn_without_data_and_with_measured_times(python, run_toml, tmp_path):
    toml = tmp_path / "without_data.toml"
    toml.write_text(run_toml.read_text().replace('path = "', 'path = "nowhere'))
    stage_0 = [("forward", 0, 0, 0, 10), ("forward", 0, 1, 10, 20)]
    stage_0 += [("backward", 0, 0, 50, 70), ("backward", 0, 1, 80, 100)]
    stage_1 = [("forward", 1, 0, 20, 30), ("backward", 1, 0, 30, 50)]
    stage_1 += [("forward", 1, 1, 50, 60), ("backward", 1, 1, 60, 80)]
    for rank, actions in ((0, stage_0), (2, stage_1)):  # 4 ranks, 2 per stage
        write_trace(tmp_path / f"rank{rank}_trace.json", actions)
    out = tmp_path / "drawn" / "four"
    done = draw(python, toml, "--ranks", 4, "--trace", tmp_path, "--out", out, *PIPELINE)
    assert done.returncode == 0, done.stderr
    computed, measured, *files = done.stdout.splitlines()
    assert "1F1B, 2 stages, 2 micro-batches of 1, computed: idle" in computed
    assert measured.startswith("measured") and measured.endswith("idle 40.0% of the time")
    assert files == [f"{out}.png", f"{out}.svg"] and out.with_name("four.svg").stat().st_size > 0


def test_user_errors_have_no_traceback(run_toml, tmp_path, capsys):
    for argv, message in (
        (["nowhere.toml", "--ranks", 2], "cannot be read"),
        ([run_toml, "--ranks", 0], "--ranks 0: must be at least 1"),
        ([run_toml, "--ranks", 3, "--parallelism.tensor_parallel_degree", 2], "ranks, 3"),
        ([run_toml, "--ranks", 2, "--trace", tmp_path], "has no pipeline to measure"),
        (
            [run_toml, "--ranks", 2, "--trace", tmp_path, *PIPELINE],
            "cannot be read as a profiler trace",
        ),
        ([run_toml, "--ranks", 2, "--out", "/proc/nowhere/x"], "cannot be written"),
        ([run_toml, "--ranks", 2, "--paralelism.tensor_parallel_degree", 2], "paralelism"),
    ):
        assert draw_command.main([str(argument) for argument in argv]) == 2
        error = capsys.readouterr().err
        assert error.startswith("titanlite: ") and message in error
