"""Plots of planned layouts: stacked bars of memory or time, and memory against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from titanlite_lab.figure import FAINT, INK, new_figure, save_figure
from titanlite_lab.loss_curve import RED, style_panel

_COLOURS = (
    "#2f6fb2",
    "#7fa6d6",
    "#e2a94f",
    "#5da271",
    "#c96f62",
    "#8e5ea2",
    "#b9d0ec",
    "#c48a00",
    "#2a9d8f",
    "#6d597a",
    "#9aa3ad",
    "#3c4a5a",
    "#a4c3a2",
    "#e6c9a8",
)


def draw_stacked_bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    unit: str,
    out: Path,
    limit: tuple[str, float] | None = None,
) -> None:
    """One horizontal bar for each row: part -> length; `limit` is a labelled vertical line.

    The order of the parts, those of length 0 included, decides their colours.
    Raises ConfigError without matplotlib, or if `out` cannot be written.
    """
    figure = new_figure(10, 1.8 + 0.42 * len(rows), layout="constrained")
    panel = figure.subplots()
    totals: dict[str, float] = {}
    for parts in rows.values():
        for part, value in parts.items():
            totals[part] = totals.get(part, 0.0) + value
    colours = dict(zip(totals, _repeat_colours(len(totals)), strict=True))
    shown = [part for part in sorted(totals, key=lambda part: -totals[part]) if totals[part] > 0]
    labels, starts = list(rows), [0.0] * len(rows)
    for part in shown:
        lengths = [rows[label].get(part, 0.0) for label in labels]
        panel.barh(labels, lengths, 0.66, starts, color=colours[part], label=part)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
    for place, total in enumerate(starts):
        panel.annotate(
            f" {total:.3g}", (total, place), va="center", color=INK, fontsize=9, parse_math=False
        )
    style_panel(panel)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", labelcolor=INK)
    panel.invert_yaxis()
    panel.margins(x=0.08)
    panel.set_title(title, loc="left", color=INK, fontsize=11, parse_math=False)
    panel.set_xlabel(unit, color=FAINT)
    if limit is not None:
        panel.axvline(limit[1], color=RED, linewidth=1.2, linestyle="--", label=limit[0])
    _draw_legend_below(figure, panel, 4)
    save_figure(figure, out)


def draw_memory_time(
    title: str,
    points: Mapping[str, Sequence[tuple[float, float]]],
    recommended: tuple[float, float],
    usable_gib: float,
    out: Path,
) -> None:
    """(GiB, seconds per step) of each layout's variants, and the Pareto front of all of them.

    A ring marks the point that is recommended.

    Raises ConfigError without matplotlib, or if `out` cannot be written.
    """
    figure = new_figure(9, 5.6, layout="constrained")
    panel = figure.subplots()
    for (label, pairs), colour in zip(points.items(), _repeat_colours(len(points)), strict=True):
        gib, seconds = zip(*pairs, strict=True)
        panel.plot(gib, seconds, "o", markersize=4, alpha=0.75, color=colour, label=label)
    ring = {"markersize": 13, "markerfacecolor": "none", "markeredgewidth": 1.6, "color": INK}
    panel.plot(*recommended, "o", label="recommended: layout 1", **ring)
    front = pareto_front([pair for pairs in points.values() for pair in pairs])
    panel.plot(*zip(*front, strict=True), color=INK, linewidth=1, drawstyle="steps-post")
    panel.axvline(usable_gib, color=RED, linewidth=1.2, linestyle="--", label="usable memory")
    style_panel(panel)
    panel.set_xscale("log")
    for axis in (panel.xaxis.set_major_formatter, panel.xaxis.set_minor_formatter):
        axis("{x:g}")
    panel.tick_params(axis="x", which="both", labelcolor=FAINT, labelsize=8)
    panel.set_xlabel("GiB at the peak of the worst rank", color=FAINT)
    panel.set_ylabel("seconds a step", color=FAINT)
    panel.set_title(title, loc="left", color=INK, fontsize=11, parse_math=False)
    _draw_legend_below(figure, panel, 3)
    save_figure(figure, out)


def _draw_legend_below(figure, panel, columns: int) -> None:
    figure.legend(
        *panel.get_legend_handles_labels(),
        frameon=False,
        labelcolor=INK,
        fontsize=8.5,
        ncols=columns,
        loc="outside lower left",
    )


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points, sorted: for less of one value, the other must be larger."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _repeat_colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]
