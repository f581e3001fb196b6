"""Plot of a run's losses and learning rate, from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from titanlite.errors import DataError
from titanlite_lab.figure import FAINT, GRID, INK, new_figure, save_figure
from titanlite_lab.run_metrics import Record, read_metrics

BLUE, RED = "#2f6fb2", "#d1495b"
_TRAINING, _LR = BLUE, "#b9793a"
_VALIDATION = (RED, "#3c8d5a", "#8e5ea2", "#c48a00", "#2a9d8f", "#6d597a")  # one per set


def draw_loss(metrics_jsonl: Path, out: Path) -> None:
    """Plot training loss, validation losses and learning rate over the steps.

    Raises DataError for a file that is missing or has no step; ConfigError without matplotlib, or
    if `out` cannot be written.
    """
    steps, events = read_metrics(metrics_jsonl)
    if not steps:
        raise DataError(
            f"{metrics_jsonl}: has no step.", fix="Give the folder of a run that took a step."
        )
    try:
        figure = _plot_curves(steps, events)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{metrics_jsonl}: is not the metrics of a run ({reason}).") from None
    save_figure(figure, out)


def _plot_curves(steps: list[Record], events: list[Record]):
    figure = new_figure(9, 5.6, layout="constrained")
    loss_panel, lr_panel = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [5, 1]})
    _plot_training(loss_panel, steps)
    _plot_validation(loss_panel, events)
    _plot_lr(lr_panel, steps)
    _label(loss_panel, lr_panel, steps)
    return figure


def style_panel(panel) -> None:
    """Give a panel a faint grid, faint tick labels, and lines at its left and bottom only."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(GRID)
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.tick_params(colors=FAINT, labelsize=9, length=0)


def smooth(values: np.ndarray, fraction: float = 0.03) -> np.ndarray:
    """Moving average over `fraction` of the values; NaN and inf are skipped.

    The window is symmetric everywhere, and so narrower near the ends.
    """
    reach = max(1, round(len(values) * fraction / 2))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half_width = np.minimum(reach, np.minimum(index, index[::-1]))
    low, high = index - half_width, index + half_width + 1
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _column(records: list[Record], key: str) -> np.ndarray:
    return np.array([record[key] for record in records], dtype=float)  # null becomes NaN


def _plot_training(panel, steps: list[Record]) -> None:
    step, loss = _column(steps, "step"), _column(steps, "loss")
    panel.plot(step, loss, color=_TRAINING, linewidth=0.8, alpha=0.35)
    panel.plot(step, smooth(loss), color=_TRAINING, linewidth=2.0, label="training, smoothed")
    panel.text(
        *(0.01, 0.02, "faint: the loss of single steps, one for each line of metrics.jsonl"),
        transform=panel.transAxes,
        color=FAINT,
        fontsize=8,
    )


def _plot_validation(panel, events: list[Record]) -> None:
    validations = [event for event in events if event["event"] == "validation"]
    for number, name in enumerate(dict.fromkeys(event["name"] for event in validations)):
        of_set = [event for event in validations if event["name"] == name]
        step, loss = _column(of_set, "step"), _column(of_set, "loss")
        panel.plot(
            step,
            loss,
            color=_VALIDATION[number % len(_VALIDATION)],
            linewidth=1.0,
            marker="o",
            markersize=4.5,
            markeredgecolor="white",
            label=f"validation: {name}, {loss[-1]:.3f} at the end",
        )


def _plot_lr(panel, steps: list[Record]) -> None:
    step, lr = _column(steps, "step"), _column(steps, "lr")
    panel.plot(step, lr, color=_LR, linewidth=1.2, alpha=0.8)
    panel.fill_between(step, lr, color=_LR, alpha=0.12, linewidth=0)
    panel.set_ylim(bottom=0)
    panel.set_ylabel("learning\nrate", color=FAINT)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    panel.yaxis.get_offset_text().set(color=FAINT, fontsize=8)


def _label(loss_panel, lr_panel, steps: list[Record]) -> None:
    for panel in (loss_panel, lr_panel):
        style_panel(panel)
    loss_panel.set_ylabel("loss, nats per token", color=INK)
    loss_panel.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper right")
    tokens = steps[-1]["tokens"]
    loss_panel.set_title(
        f"{steps[-1]['step']:,} steps, {tokens:,} tokens", loc="left", color=INK, fontsize=11
    )
    lr_panel.set_xlabel("step", color=INK)
    lr_panel.margins(x=0.01)
