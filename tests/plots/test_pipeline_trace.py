"""What a trace says of the pipeline: the last run of its schedule, on the clock of what ran it."""

from __future__ import annotations

import json

import pytest

from titanlite.errors import DataError
from titanlite.parallelize.schedule import format_trace_name
from titanlite.plots.pipeline_trace import read_actions


def event(name, start, category="user_annotation") -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 5}


def read(tmp_path, events):
    path = tmp_path / "rank0_trace.json"
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 2_000_000_000}))
    return read_actions(path)


FORWARD, BACKWARD = (format_trace_name("pipeline", kind, 3, 1) for kind in ("forward", "backward"))


def test_of_a_step_that_accumulates_the_last_run_is_read_and_evaluation_is_not(tmp_path):
    events = [event(BACKWARD, 10), event(FORWARD, 0), event(FORWARD, 20), event(BACKWARD, 30)]
    noise = [event(format_trace_name("evaluation", "forward", 3, 1), 40), event("aten::mm", 21)]
    first, second = read(tmp_path, events + noise)
    assert (first.kind, first.stage, first.microbatch) == ("forward", 3, 1)
    assert first.start == pytest.approx(2 + 20e-6, abs=1e-9)
    assert second.kind == "backward" and second.end - second.start == pytest.approx(5e-6, abs=1e-9)


def test_a_gpu_is_timed_by_what_it_did_not_by_when_it_was_told(tmp_path):
    events = [event(FORWARD, 0), event(FORWARD, 700, "gpu_user_annotation")]
    assert [action.start for action in read(tmp_path, events)] == [pytest.approx(2 + 700e-6)]


ODD = {"ph": "X", "cat": "user_annotation", "name": 5, "ts": 1, "dur": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": []}',
        pytest.param("[" * 100_000, id="deep"),
        json.dumps({"traceEvents": [ODD]}),
        json.dumps({"traceEvents": [{**ODD, "name": FORWARD, "ts": "now"}]}),
    ],
)
def test_a_file_that_is_no_trace_of_a_pipeline_is_refused(text, tmp_path):
    path = tmp_path / "rank0_trace.json"
    path.write_text(text)
    with pytest.raises(DataError):
        read_actions(path)
    with pytest.raises(DataError, match="no trace that can be read"):
        read_actions(tmp_path / "rank1_trace.json")
