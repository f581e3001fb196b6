"""The report of one or several runs: one HTML page that needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.errors import ConfigError
from titanlite.metrics.jsonl import MEASUREMENTS
from titanlite_lab.loss_curve import smooth
from titanlite_lab.report.advice import advise
from titanlite_lab.report.chart import Chart, ChartLine, ChartMarker, format_number
from titanlite_lab.report.history import RunHistory, finite_median, read_runs
from titanlite_lab.report.page import html_page, html_section, html_table

COLOURS = ("#2f6fb2", "#d1495b", "#3c8d5a", "#8e5ea2", "#c48a00", "#2a9d8f", "#6d597a", "#7a7f87")
VALIDATION_COLOURS = ("#d1495b", "#3c8d5a", "#8e5ea2", "#c48a00")  # in the report of one run
EVENT_COLOURS = {  # events that the charts mark
    "step_skipped": "#c48a00",
    "spike": "#c48a00",
    "rolled_back": "#d1495b",
    "rollback_failed": "#d1495b",
    "hardware_fault": "#8e5ea2",
    "replica_mismatch": "#8e5ea2",
    "diverged": "#d1495b",
    "straggler": "#6d597a",
    "resumed": "#2f6fb2",
    "loaded": "#2f6fb2",
    "returned": "#3c8d5a",
    "settings_changed": "#c48a00",
    "stopped": "#7a7f87",
}
ROUTINE_EVENTS = ("validation", "checkpoint_saved", "memory_checkpoint_saved", *MEASUREMENTS)
USES = {  # of the wall time, as the page names them
    "training": "training",
    "data": "waiting for data",
    "saving": "blocked by saving",
    "startup": "starting and compiling",
    "repeated": "repeated steps",
    "stopped": "stopped",
    "other": "validation and other",
}
USE_COLOURS = {
    "training": "#3c8d5a",
    "data": "#c48a00",
    "saving": "#2f6fb2",
    "startup": "#8e5ea2",
    "repeated": "#d1495b",
    "stopped": "#7a7f87",
    "other": "#b8bec6",
}
MAX_EVENT_ROWS = 60


def write_report(folders: Sequence[Path], out: Path) -> list[RunHistory]:
    """Write the report of the runs in `folders` to `out`; returns the runs.

    Raises DataError for a folder that no run wrote, ConfigError if `out` cannot be written.
    """
    runs = read_runs(folders)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render_report(runs), "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{out}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None
    return runs


def render_report(runs: Sequence[RunHistory]) -> str:
    """The page as text."""
    title = " / ".join(run.name for run in runs)
    sections = [
        html_section("Summary", _summary_table(runs)),
        html_section("Advice", "".join(map(_advice_list, runs))),
        f'<div class="charts">{"".join(chart.html() for chart in _charts(runs))}</div>',
        html_section("Where the time went", "".join(map(_goodput_bar, runs))),
        html_section("Events", "".join(map(_event_table, runs))),
        html_section("Starts", "".join(map(_start_table, runs))),
        html_section("Checkpoints", "".join(map(_checkpoint_table, runs))),
        html_section("Configuration", _configuration_table(runs)),
    ]
    return html_page(title, sections)


# --- summary -------------------------------------------------------------------------------------


def _summary_table(runs: Sequence[RunHistory]) -> str:
    rows = zip(*(_summary(run) for run in runs), strict=True)
    cells = ([column[0][0], *(value for _, value in column)] for column in rows)
    return html_table(["", *(run.name for run in runs)], cells)


def _summary(run: RunHistory) -> list[tuple[str, str]]:
    last, loss = run.steps[-1], run.column("loss")
    validation = ", ".join(
        f"{name} {format_number(events[-1]['loss'])}"
        for name, events in run.validation_sets.items()
    )
    speed = finite_median(run.column("tokens_per_second"))
    return [
        ("steps", f"{last['step']:,}"),
        ("tokens", format_number(last["tokens"])),
        ("training loss, smoothed", format_number(float(smooth(np.array(loss), 0.05)[-1]))),
        ("validation loss", validation or "-"),
        ("tokens per second, median", format_number(speed)),
        ("MFU, median", _percent(finite_median(run.column("mfu")))),
        ("peak memory", f"{max(run.column('peak_memory_gib'), default=math.nan):.3g} GiB"),
        ("wall time", _format_duration(run.goodput.total)),
        ("goodput", _percent(run.goodput.fraction)),
        ("starts", str(len(run.starts) or "-")),
        ("checkpoints saved", str(len(run.events_named("checkpoint_saved")))),
        ("roll-backs", str(len(run.events_named("rolled_back")))),
        ("skipped steps", str(len(run.events_named("step_skipped")))),
    ]


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}" if math.isfinite(fraction) else "-"


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.3g} min" if minutes < 120 else f"{hours:.3g} h"


def _advice_list(run: RunHistory) -> str:
    items = "".join(
        f'<li class="{advice.level}"><b>{escape(advice.title)}</b>'
        f" <span>{escape(advice.figure)}</span> {escape(advice.action)}</li>"
        for advice in advise(run)
    )
    nothing = "<li>Nothing stands out.</li>"
    return f'<h3>{escape(run.name)}</h3><ul class="advice">{items or nothing}</ul>'


# --- charts --------------------------------------------------------------------------------------


def _charts(runs: Sequence[RunHistory]) -> Iterator[Chart]:
    markers = [marker for run in runs for marker in _markers(run, len(runs) > 1)]
    note = "Faint lines: single steps, and attempts that were repeated later. Marks: events."
    yield Chart(
        "Loss",
        [line for number, run in enumerate(runs) for line in _loss_lines(run, number, len(runs))],
        markers,
        unit="nats per token",
        high_quantile=0.99,
        note=note,
    )
    yield Chart("Gradient norm", _lines(runs, "grad_norm"), markers, log=True)
    yield Chart("Learning rate", _lines(runs, "lr"), from_zero=True)
    yield Chart("Throughput", _lines(runs, "tokens_per_second"), unit="tokens/s", from_zero=True)
    yield Chart("Step time", _lines(runs, "step_seconds"), unit="s", from_zero=True)
    yield Chart("Waiting for data", _lines(runs, "data_seconds"), unit="s per step", from_zero=True)
    yield Chart("Peak memory", _lines(runs, "peak_memory_gib"), unit="GiB", from_zero=True)
    yield Chart("Loss scale", _lines(runs, "loss_scale"), log=True)


def _lines(runs: Sequence[RunHistory], key: str) -> list[ChartLine]:
    return [
        ChartLine(
            run.name,
            COLOURS[number % len(COLOURS)],
            [(record["step"], y) for record, y in zip(run.steps, run.column(key), strict=True)],
        )
        for number, run in enumerate(runs)
    ]


def _loss_lines(run: RunHistory, number: int, runs: int) -> Iterator[ChartLine]:
    colour = COLOURS[number % len(COLOURS)]
    steps, loss = [record["step"] for record in run.steps], run.column("loss")
    for attempt in run.abandoned:
        points = [(r["step"], math.nan if r.get("loss") is None else r["loss"]) for r in attempt]
        yield ChartLine("", "#d1495b" if runs == 1 else colour, points, faint=True)
    yield ChartLine("", colour, list(zip(steps, loss, strict=True)), faint=True)
    smoothed = smooth(np.array(loss)).tolist()
    label = "training" if runs == 1 else run.name
    yield ChartLine(label, colour, list(zip(steps, smoothed, strict=True)))
    for index, (name, events) in enumerate(run.validation_sets.items()):
        own = VALIDATION_COLOURS[index % len(VALIDATION_COLOURS)] if runs == 1 else colour
        label = f"validation: {name}" if runs == 1 else f"{run.name}, validation: {name}"
        yield ChartLine(label, own, [(e["step"], e["loss"]) for e in events], dashed=True)


def _markers(run: RunHistory, with_name: bool) -> Iterator[ChartMarker]:
    prefix = f"{run.name}: " if with_name else ""
    for event in run.events_named(*EVENT_COLOURS):
        name = event["event"]
        text = f"{prefix}{name} at step {event['step']}: {_details(event)}"
        yield ChartMarker(event["step"], text, EVENT_COLOURS[name])
        if name == "rolled_back":  # also the step of the spike, whose line was removed
            start = f"{prefix}rolled back from step {event['from_step']} to {event['step']}"
            yield ChartMarker(event["from_step"], start, EVENT_COLOURS[name])


def _goodput_bar(run: RunHistory) -> str:
    goodput = run.goodput
    parts = [(name, s) for name, s in goodput.parts() if s > 0.0005 * goodput.total]
    bars = "".join(
        f'<i style="flex:{seconds / goodput.total:.5f};background:{USE_COLOURS[name]}"></i>'
        for name, seconds in parts
    )
    labels = "".join(
        f'<span style="--c:{USE_COLOURS[name]}">{USES[name]} {_percent(seconds / goodput.total)},'
        f" {_format_duration(seconds)}</span>"
        for name, seconds in parts
    )
    return (
        f"<h3>{escape(run.name)}: goodput {_percent(goodput.fraction)} of"
        f' {_format_duration(goodput.total)}</h3><div class="bar">{bars}</div>'
        f'<div class="legend">{labels}</div>'
    )


# --- tables --------------------------------------------------------------------------------------


def _event_table(run: RunHistory) -> str:
    events = [event for event in run.events if event["event"] not in ROUTINE_EVENTS]
    named = ((event["event"].replace("_", " "), event) for event in events)
    rows = ((e["step"], _clock(e["time"]), name, _details(e)) for name, e in named)
    shown = list(rows)[:MAX_EVENT_ROWS]
    table = html_table(["step", "time", "event", "details"], shown)
    more = len(events) - len(shown)
    rest = f"<p>{more} more in metrics.jsonl.</p>" if more else ""
    return f"<h3>{escape(run.name)}</h3>{table}{rest}" if table else ""


def _details(event: dict[str, Any]) -> str:
    fields = (item for item in event.items() if item[0] not in ("event", "step", "time"))
    return ", ".join(
        f"{key} {format_number(value) if isinstance(value, float) else value}"
        for key, value in fields
        if value not in (None, "")
    )


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%m-%d %H:%M:%S")


def _start_table(run: RunHistory) -> str:
    rows = (
        (
            _clock(start.time),
            start.host,
            start.ranks,
            start.from_step,
            "-" if start.step is None else start.step,
            "killed, or still running" if start.code is None else f"exit code {start.code}",
            start.reason,
        )
        for start in run.starts
    )
    header = ["time", "host", "ranks", "from step", "to step", "end", "reason"]
    table = html_table(header, rows)
    return f"<h3>{escape(run.name)}</h3>{table}" if table else ""


def _checkpoint_table(run: RunHistory) -> str:
    saved = run.events_named("checkpoint_saved", "checkpoint_failed")
    rows = (
        (
            event["step"],
            _clock(event["time"]),
            f"{event.get('seconds', math.nan):.3g} s",
            f"{event.get('blocked_seconds', math.nan):.3g} s",
            event.get("problem", ""),
        )
        for event in saved[-20:]
    )
    table = html_table(["step", "time", "written in", "blocked for", "problem"], rows)
    return f"<h3>{escape(run.name)}, the last {min(20, len(saved))}</h3>{table}" if table else ""


def _configuration_table(runs: Sequence[RunHistory]) -> str:
    """The keys in which several runs differ; of a single run all in its config.toml."""
    keys = sorted({key for run in runs for key in run.config})
    rows = [(key, *(str(run.config.get(key, "-")) for run in runs)) for key in keys]
    header = ["key", *(run.name for run in runs)]
    if len(runs) > 1:
        different = [row for row in rows if len(set(row[1:])) > 1]
        return html_table(header, different) or "<p>The configurations are equal.</p>"
    return f"<details><summary>All {len(rows)} keys</summary>{html_table(header, rows)}</details>"
