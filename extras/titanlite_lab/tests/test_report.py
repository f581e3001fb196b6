"""The report of a run: where its time went, advice with figures, one page without network."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from titanlite.errors import DataError
from titanlite_lab.commands import report as report_run
from titanlite_lab.report.advice import advise
from titanlite_lab.report.chart import Chart, ChartLine, ChartMarker, format_number, thin_out
from titanlite_lab.report.history import read_run, read_runs
from titanlite_lab.report.run import render_report, write_report

STEP_SECONDS, DATA_SECONDS = 2.0, 0.5


def step_line(step: int, time: float, **changed) -> dict:
    line = {"step": step, "loss": 4.0 - 0.01 * step, "grad_norm": 0.5, "lr": 1e-3, "tokens": step}
    line |= {"step_seconds": STEP_SECONDS, "data_seconds": DATA_SECONDS, "mfu": 0.4, "time": time}
    line |= {"tokens_per_second": 10.0, "tflops_per_device": 400.0, "peak_memory_gib": 1.0}
    return {**line, "loss_scale": None, **changed}


def write_lines(path, lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run(folder, steps, events=(), replaced=(), starts=()):
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", [*steps, *events])
    if replaced:
        write_lines(folder / "metrics.replaced.jsonl", replaced)
    write_lines(folder / "starts.jsonl", starts)
    return read_run(folder)


def start(time: float, from_step: int = 0) -> dict:
    return {
        "event": "start", "time": time, "host": "h", "pid": 1, "ranks": 2, "from_step": from_step,
    }  # fmt: skip


@pytest.fixture
def killed_run(tmp_path):
    """Killed after step 20, and started again 100 s later from the checkpoint of step 10.

    A step takes 2.5 s; the first one of the second process is compiled for 8 s more.
    """
    first = [step_line(s, 1030 + 2.5 * s) for s in range(1, 21)]  # starts at 1000
    later = [step_line(s, 1230 + 8 + 2.5 * (s - 10)) for s in range(11, 31)]  # starts at 1180
    later[0] |= {"step_seconds": STEP_SECONDS + 8, "time": 1230 + 8 + 2.5}
    saved = {"event": "checkpoint_saved", "step": 10, "time": 1055, "blocked_seconds": 0.0}
    spike = {"event": "step_skipped", "step": 15, "time": 1250, "reason": "<b>inf & NaN</b>"}
    starts = [start(1000), start(1180, from_step=10)]
    return write_run(tmp_path / "run", first[:10] + later, [saved, spike], first[10:], starts)


def test_the_wall_time_is_attributed_to_its_use(killed_run):
    parts = dict(killed_run.goodput.parts())
    assert parts == {
        "training": pytest.approx(30 * STEP_SECONDS),
        "data": pytest.approx(30 * DATA_SECONDS),
        "saving": 0,
        "startup": pytest.approx(30 + 50 + 8),
        "repeated": pytest.approx(10 * 2.5),
        "stopped": pytest.approx(100),
        "other": pytest.approx(0, abs=1e-6),
    }
    assert killed_run.goodput.total == pytest.approx(1238 + 50 - 1000)


def test_steps_between_two_lines_count(tmp_path):
    run = write_run(tmp_path / "run", [step_line(s, 1000 + 2.5 * s) for s in (1, 10, 20)])
    assert run.goodput.training == pytest.approx(20 * STEP_SECONDS)


def titles(run) -> str:
    return " | ".join(f"{advice.title}: {advice.figure}" for advice in advise(run))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"data_seconds": 1.0}, "Steps wait for data: 33% of the median step, 1 s"),
        ({"mfu": 0.1}, "could: median MFU 10.0%"),
        ({"loss": 3.0}, "still high: 0.00% lower over the last 20%"),
        ({"grad_norm": 2.0}, "Most steps are clipped: 100% of the steps"),
    ],
    ids=["data", "mfu", "plateau", "clipping"],
)
def test_advice_names_the_figure_that_it_follows_from(change, expected, tmp_path):
    healthy = [step_line(s, 2.5 * s, data_seconds=0.01) for s in range(1, 61)]
    run = write_run(tmp_path / "run", healthy)
    assert advise(run) == []
    run = write_run(tmp_path / "other", [{**line, **change} for line in healthy])
    run.config["training.max_norm"] = 1.0
    assert expected in titles(run)


def test_what_the_run_reported_is_in_the_advice(tmp_path):
    rolled_back = {"event": "rolled_back", "step": 4, "from_step": 7, "time": 30.0}
    fault = {"event": "hardware_fault", "step": 8, "host": "node-3", "time": 31.0}
    lines = [step_line(s, 2.5 * s, data_seconds=0.01) for s in range(1, 11)]
    run = write_run(tmp_path / "run", lines, [rolled_back, fault])
    found = titles(run)
    assert "The guard rolled back: 1 time, at step 7" in found and "step 8; node-3" in found
    page = render_report([run])
    assert "<td>roll-backs</td><td>1</td>" in page and "rolled back from step 7 to 4" in page


def test_a_value_that_is_not_finite_is_named_in_the_advice(tmp_path):
    """metrics.jsonl has null for inf and NaN."""
    diverged = {"event": "diverged", "step": 9, "time": 31.0, "reason": "inf or NaN"}
    diverged |= {"loss": None, "grad_norm": 3.499040126800537}
    run = write_run(tmp_path / "run", [step_line(8, 30.0)], [diverged])
    assert "inf or NaN at step 9, loss inf or NaN, gradient norm 3.499" in titles(run)
    assert "None" not in titles(run) and "40126" not in titles(run)


def test_runs_whose_folders_have_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name / "out", [step_line(s, 2.5 * s) for s in range(1, 4)])
    runs = write_report([tmp_path / "a" / "out", tmp_path / "b" / "out"], tmp_path / "report.html")
    assert [run.name for run in runs] == ["a/out", "b/out"]
    assert [run.name for run in read_runs([tmp_path / "a" / "out"])] == ["out"]


def test_a_rising_loss_is_reported_and_a_cpu_has_no_mfu_advice(tmp_path):
    losses = [3 - 0.02 * s if s < 40 else 2.2 + 0.1 * (s - 40) for s in range(1, 61)]
    lines = [
        step_line(s, 2.5 * s, loss=losses[s - 1], mfu=0.1, tflops_per_device=0.01, data_seconds=0)
        for s in range(1, 61)
    ]
    found = titles(write_run(tmp_path / "run", lines))
    assert "The loss rises: smoothed loss 4." in found and "MFU" not in found


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects tags and attributes."""

    VOID = ("meta", "line", "path")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_the_charts_mark_where_settings_changed(tmp_path):
    steps, changes = [step_line(s, 2.5 * s) for s in (1, 2, 3)], {"optimizer.lr": [0.1, 0.2]}
    event = {"event": "settings_changed", "step": 2, "time": 5.0, "changes": changes}
    text = render_report([write_run(tmp_path / "run", steps, [event])])
    assert 'title="settings_changed at step 2: ' in text and "optimizer.lr" in text


def test_the_page_needs_no_network_and_escapes_what_runs_wrote(killed_run):
    text = render_report([killed_run, killed_run])
    page = Page(text)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "onclick")]
    assert "http" not in text and "@import" not in text
    assert "&lt;b&gt;inf &amp; NaN&lt;/b&gt;" in text and "<b>inf" not in text


def test_what_is_missing_or_not_finite_leaves_a_gap(tmp_path):
    lines = [step_line(s, 2.5 * s, loss=None if s == 2 else 3.0, mfu=None) for s in (1, 2, 3)]
    nan = {"event": "validation", "name": "v", "step": 3, "time": 9.0, "loss": None}
    text = render_report([write_run(tmp_path / "run", lines, [nan])])
    Page(text)
    chart = Chart("c", [ChartLine("l", "#fff", [(1, 3.0), (2, float("nan")), (3, 3.0)])])
    assert chart.html().count("M") == 2  # two separate lines
    assert Chart("c", [ChartLine("l", "#fff", [(1, float("nan"))])]).html() == ""


def test_thinning_keeps_spikes_and_markers_keep_their_place():
    points = [(float(x), 9.0 if x == 4321 else 1.0) for x in range(10_000)]
    thin = thin_out(points, 100)
    assert len(thin) <= 110 and (4321.0, 9.0) in thin and thin == sorted(thin)
    chart = Chart("c", [ChartLine("l", "#fff", [(0, 1), (10, 2)])], [ChartMarker(5, "e", "#000")])
    assert "left:50.00%" in chart.html()


def test_numbers_are_short():
    values = (1234.0, 12_345.0, 3.2e9, 0.0001234, float("nan"))
    assert [format_number(v) for v in values] == ["1234", "12.35k", "3.2B", "0.0001234", "-"]


def test_a_folder_that_no_run_wrote_is_refused(tmp_path, capsys):
    assert report_run.main([str(tmp_path)]) == 2
    assert "Give the folder of a run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match="is not the folder of a run"):
        read_run(tmp_path)
    events = ({"event": "validation", "loss": 1.0}, {"event": "rolled_back"})
    for event in events:  # without the name, and without the step that it went back from
        with pytest.raises(DataError, match="is not the folder of a run"):
            write_run(tmp_path, [step_line(1, 9)], [{"step": 1, "time": 9, **event}])
    abandoned = {key: value for key, value in step_line(2, 8).items() if key != "loss"}
    assert "Summary" in render_report([write_run(tmp_path, [step_line(1, 9)], (), [abandoned])])


def test_steps_that_a_roll_back_took_back_are_counted_once(tmp_path):
    """One process, rolled back from step 20 to 10; the clock goes on."""
    first = [step_line(s, 1000 + 2.5 * s) for s in range(1, 21)]
    later = [step_line(s, 1050 + 2.5 * (s - 10)) for s in range(11, 31)]
    back = {"event": "rolled_back", "step": 10, "from_step": 20, "time": 1050}
    run = write_run(tmp_path / "run", first[:10] + later, [back], first[10:], [start(1000)])
    assert run.goodput.repeated == pytest.approx(10 * 2.5)
    assert run.goodput.total == pytest.approx(100)


def test_starts_that_recorded_nothing_are_counted_once(tmp_path):
    """Killed after step 10, then two starts that crashed before their first step."""
    first = [step_line(s, 1000 + 2.5 * s) for s in range(1, 11)]
    later = [step_line(s, 1300 + 2.5 * (s - 10)) for s in range(11, 21)]
    starts = [start(1000), *(start(time, from_step=10) for time in (1100, 1200, 1300))]
    run = write_run(tmp_path / "run", first + later, starts=starts)
    assert run.goodput.stopped == pytest.approx(1300 - 1025)
    assert run.goodput.total == pytest.approx(1325 - 1000)


def test_an_incomplete_line_that_a_resume_moved_does_not_hide_the_run(tmp_path):
    lines = [step_line(s, 1000 + 2.5 * s) for s in range(1, 11)]
    write_run(tmp_path / "run", lines, replaced=lines[5:])
    replaced = tmp_path / "run" / "metrics.replaced.jsonl"
    replaced.write_text('{"step": 9, "lo\n' + replaced.read_text())
    assert [r["step"] for r in read_run(tmp_path / "run").abandoned[0]] == [6, 7, 8, 9, 10]


def test_meters_do_not_fill_the_table_of_events(tmp_path):
    norms = {"event": "layer_norms", "step": 1, "time": 5.0, "gradient": {"layers.0": 1.25}}
    noise = {"event": "noise_scale", "step": 1, "time": 5.0, "critical_batch": 77.0}
    run = write_run(tmp_path / "run", [step_line(1, 5.0)], [norms, noise])
    page = render_report([run])
    assert "layers.0" not in page and "critical_batch" not in page
