"""A picture of what a run has learned, from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file
from titanlite.plots.figure import FAINT, GRID, INK, new_figure

BLUE, RED = "#2f6fb2", "#d1495b"
_TRAIN, _RATE = BLUE, "#b9793a"
_TEXTS = (RED, "#3c8d5a", "#8e5ea2", "#c48a00", "#2a9d8f", "#6d597a")  # validation


def draw_loss(metrics_jsonl: Path, png: Path) -> None:
    """Training loss, validation losses and learning rate over the steps.

    Raises DataError for a file that is missing or holds no step; ConfigError without matplotlib.
    """
    steps, events = read_metrics(metrics_jsonl)
    if not steps:
        raise DataError(
            f"{metrics_jsonl}: holds no step.", fix="Give the folder of a run that has begun."
        )
    try:
        figure = _drawn(steps, events)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{metrics_jsonl}: is not the metrics of a run ({why}).") from None
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png)


def _drawn(steps, events):
    figure = new_figure(9, 5.6, layout="constrained")
    loss_panel, rate_panel = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [5, 1]}
    )
    _draw_training(loss_panel, steps)
    _draw_validation(loss_panel, events)
    _draw_rate(rate_panel, steps)
    _finish(loss_panel, rate_panel, steps)
    return figure


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(step lines, event lines) of a metrics.jsonl; a line being written is left out."""
    try:
        lines = read_regular_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).",
            fix="Give the folder of a run, with its metrics.jsonl.",
        ) from None
    steps, events = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError as error:
            if number < len(lines):
                raise DataError(f"{path}: line {number} is not JSON ({error}).") from None
            break
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number} is not a JSON object: {line:.40}")
        (events if "event" in record else steps).append(record)
    return steps, events


def quieten(panel) -> None:
    """Leaves a panel a faint grid and faint numbers, so that its curves speak."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GRID)
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=FAINT, labelsize=9, length=0)


def smooth(values: np.ndarray, share: float = 0.03) -> np.ndarray:
    """A running mean over `share` of the values, narrower near the ends; gaps (NaN) left out."""
    reach = max(1, round(len(values) * share / 2))
    there = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    at = np.arange(len(values))
    near = np.minimum(reach, np.minimum(at, at[::-1]))  # as far to the left as to the right
    low, high = at - near, at + near + 1
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _column(records: list[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([record[key] for record in records], dtype=float)  # null becomes NaN


def _draw_training(panel, steps) -> None:
    at, loss = _column(steps, "step"), _column(steps, "loss")
    panel.plot(at, loss, color=_TRAIN, linewidth=0.8, alpha=0.35)
    panel.plot(at, smooth(loss), color=_TRAIN, linewidth=2.0, label="training")


def _draw_validation(panel, events) -> None:
    validations = [event for event in events if event["event"] == "validation"]
    for number, name in enumerate(dict.fromkeys(event["name"] for event in validations)):
        these = [event for event in validations if event["name"] == name]
        at, loss = _column(these, "step"), _column(these, "loss")
        panel.plot(
            at,
            loss,
            color=_TEXTS[number % len(_TEXTS)],
            linewidth=1.0,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            label=f"validation: {name}, {loss[-1]:.3f} at the end",
        )


def _draw_rate(panel, steps) -> None:
    at, rate = _column(steps, "step"), _column(steps, "lr")
    panel.plot(at, rate, color=_RATE, linewidth=1.2, alpha=0.8)
    panel.fill_between(at, rate, color=_RATE, alpha=0.12, linewidth=0)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("learning\nrate", color=FAINT)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    panel.yaxis.get_offset_text().set(color=FAINT, fontsize=8)


def _finish(loss_panel, rate_panel, steps) -> None:
    for panel in (loss_panel, rate_panel):
        quieten(panel)
    loss_panel.set_ylabel("loss, nats a token", color=INK)
    loss_panel.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper right")
    tokens = steps[-1]["tokens"]
    loss_panel.set_title(
        f"{steps[-1]['step']:,} steps, {tokens:,} tokens", loc="left", color=INK, fontsize=11
    )
    rate_panel.set_xlabel("step", color=INK)
    rate_panel.margins(x=0.01)
