"""Pipeline actions come from the last schedule run in a trace, with GPU times if it has them."""

from __future__ import annotations

import json

import pytest

from titanlite.errors import DataError
from titanlite.parallelize.schedule import format_trace_name
from titanlite_planner.pictures.pipeline_trace import read_actions


def event(name, start, category="user_annotation") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 5}


def read(tmp_path, events):
    path = tmp_path / "rank0_trace.json"
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 2_000_000_000}))
    return read_actions(path)


FORWARD, BACKWARD = (format_trace_name("pipeline", kind, 3, 1) for kind in ("forward", "backward"))


def test_only_the_last_training_run_of_the_schedule_is_read(tmp_path):
    events = [event(BACKWARD, 10), event(FORWARD, 0), event(FORWARD, 20), event(BACKWARD, 30)]
    other = [event(format_trace_name("evaluation", "forward", 3, 1), 40), event("aten::mm", 21)]
    first, second = read(tmp_path, events + other)
    assert first.action == ("forward", 3, 1)
    assert first.start == pytest.approx(2 + 20e-6, abs=1e-9)
    assert second.action.kind == "backward" and second.end - second.start == pytest.approx(
        5e-6, abs=1e-9
    )


def test_gpu_times_are_preferred_to_the_times_of_launches(tmp_path):
    events = [event(FORWARD, 0), event(FORWARD, 700, "gpu_user_annotation")]
    assert [timed.start for timed in read(tmp_path, events)] == [pytest.approx(2 + 700e-6)]


NUMBER_AS_NAME = {"ph": "X", "cat": "user_annotation", "name": 5, "ts": 1, "dur": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        pytest.param("[" * 100_000, id="deep"),
        json.dumps({"traceEvents": [NUMBER_AS_NAME]}),
        json.dumps({"traceEvents": [{**NUMBER_AS_NAME, "name": FORWARD, "ts": "now"}]}),
    ],
)
def test_a_file_without_pipeline_actions_is_rejected(text, tmp_path):
    path = tmp_path / "rank0_trace.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_actions(path)
    with pytest.raises(DataError, match="cannot be read as a profiler trace"):
        read_actions(tmp_path / "rank1_trace.json")
