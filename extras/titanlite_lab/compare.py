"""Compare the metrics.jsonl of two runs, metric by metric and step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from titanlite.errors import ConfigError, DataError
from titanlite.log import pluralize
from titanlite.metrics.sinks import METRICS_FILE
from titanlite_lab.figure import FAINT, INK, new_figure, save_figure
from titanlite_lab.loss_curve import BLUE, RED, style_panel
from titanlite_lab.run_metrics import read_metrics

# must agree within the tolerance; the first two are plotted
_APPROXIMATE = ("loss", "grad_norm", "lr")
_EXACT = ("tokens", "samples")  # must be equal, else the runs read different batches
_DIFFERENCE_COLOUR = "#c48a00"

RunMetrics = dict[str, dict[int, float]]  # metric -> step -> value


@dataclass(frozen=True)
class MetricComparison:
    """One metric of both runs at the steps that both have; arrays are [N], steps increase."""

    name: str
    tolerance: float  # allowed relative difference
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @cached_property
    def difference(self) -> np.ndarray:
        """|a - b| / max(|a|, |b|): 0 if both are NaN, inf if one is."""
        with np.errstate(invalid="ignore"):
            difference = np.abs(self.a - self.b) / np.maximum(np.abs(self.a), np.abs(self.b))
        same = (self.a == self.b) | (np.isnan(self.a) & np.isnan(self.b))
        return np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference))

    @property
    def first_index(self) -> int | None:
        """First index where the difference exceeds the tolerance."""
        beyond = np.flatnonzero(self.difference > self.tolerance)
        return int(beyond[0]) if len(beyond) else None

    @property
    def permanent_index(self) -> int | None:
        """First index from which on the difference always exceeds the tolerance."""
        within = np.flatnonzero(self.difference <= self.tolerance)
        index = int(within[-1]) + 1 if len(within) else 0
        return index if index < len(self.steps) else None


@dataclass(frozen=True)
class RunComparison:
    """Two runs and the comparison of all their metrics."""

    paths: tuple[Path, Path]
    runs: tuple[RunMetrics, RunMetrics]
    tolerance: float
    metrics: list[MetricComparison]  # loss and grad_norm first

    @property
    def different(self) -> list[MetricComparison]:
        """Metrics that differ at any step; empty if the runs agree."""
        return [metric for metric in self.metrics if metric.first_index is not None]


def compare_runs(a: Path, b: Path, tolerance: float) -> RunComparison:
    """Compare loss, z_loss, grad_norm, lr, tokens, samples and validation losses of two runs.

    A run is its job.dump_folder or its metrics.jsonl; `tolerance` is a relative difference. Raises
    ConfigError for a tolerance below 0, and DataError for a file that no run wrote or if the runs
    have no step in common.
    """
    if not 0 <= tolerance < np.inf:
        raise ConfigError(
            f"--tolerance {tolerance:g}: must be a finite number of at least 0.",
            fix="0 requires equality.",
        )
    runs = _read_run(a), _read_run(b)
    metrics = []
    for name in dict.fromkeys([*runs[0], *runs[1]]):
        series = [run.get(name, {}) for run in runs]
        steps = sorted(series[0].keys() & series[1].keys())
        arrays = (np.array([values[step] for step in steps], dtype=float) for values in series)
        allowed = 0.0 if name in _EXACT else tolerance
        metrics.append(MetricComparison(name, allowed, np.array(steps), *arrays))
    if not len(metrics[0].steps):
        steps_a, steps_b = (_format_steps(run["loss"]) for run in runs)
        raise DataError(
            f"{a} and {b} have no step in common: {steps_a} and {steps_b}.",
            fix="Compare runs with the same steps and metrics.log_freq.",
        )
    return RunComparison((a, b), runs, tolerance, metrics)


def _read_run(path: Path) -> RunMetrics:
    """Metrics of a run; of a step that is in the file twice, the last values."""
    path = path / METRICS_FILE if path.is_dir() else path
    steps, events = read_metrics(path)
    if not steps:
        raise DataError(f"{path}: has no step.", fix="Give the folder of a run that took a step.")
    try:
        metrics = {
            key: {line["step"]: _to_float(line[key]) for line in steps}
            for key in (*_APPROXIMATE, *_EXACT)
        }
        if any(line.get("z_loss") for line in steps):  # null in all: the run has none
            metrics["z_loss"] = {line["step"]: _to_float(line.get("z_loss")) for line in steps}
        for event in events:
            if event["event"] == "validation":
                losses = metrics.setdefault(f"validation {event['name']}", {})
                losses[event["step"]] = _to_float(event["loss"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: is not the {METRICS_FILE} of a run ({reason}).") from None
    return metrics


def _to_float(value: float | None) -> float:
    return float("nan") if value is None else float(value)  # a run writes NaN as null


# --- Text ----------------------------------------------------------------------------------------


def format_comparison(comparison: RunComparison) -> str:
    """The compared steps, and a table of how much and where each metric differs."""
    steps_a, steps_b = (set(run["loss"]) for run in comparison.runs)
    facts = [(label, str(path)) for label, path in zip("AB", comparison.paths, strict=True)]
    step_sets = {
        "compared": steps_a & steps_b,
        "only in A": steps_a - steps_b,
        "only in B": steps_b - steps_a,
    }
    for label, steps in step_sets.items():
        if steps:
            all_steps = steps_a | steps_b
            count = pluralize(len(steps), "step")
            facts.append((label, f"{count}: {_format_steps(steps, all_steps)}"))
    header = ["relative difference", "largest", "at step"]
    if comparison.different:
        header += ["first at", "A", "B", "always from"]
    rows = [header, *(_table_row(metric, len(header)) for metric in comparison.metrics)]
    return "\n".join([*(f"{label:9}  {fact}" for label, fact in facts), "", *_align(rows)])


def verdict(comparison: RunComparison) -> str:
    """One line: the runs agree, or the first step where they differ and in which metrics."""
    tolerance = f"{comparison.tolerance:g}"
    if not comparison.different:
        compared = pluralize(len(comparison.metrics[0].steps), "step")
        return (
            f"The runs agree at {compared}: tokens and samples exactly, all else that both have"
            f" at a common step within {tolerance}."
        )
    first_steps = {m.name: m.steps[m.first_index] for m in comparison.different}
    first = min(first_steps.values())
    names = ", ".join(name for name, step in first_steps.items() if step == first)
    return f"The runs first differ at step {first:,}, in {names} (tolerance {tolerance})."


def _table_row(metric: MetricComparison, columns: int) -> list[str]:
    row = [metric.name, "no common step"]
    if len(metric.steps):
        largest = int(metric.difference.argmax())
        row = [metric.name, _format_difference(metric.difference[largest])]
        row += [f"{metric.steps[largest]:,}" if metric.difference[largest] else ""]
    if metric.first_index is not None:
        digits = ",.0f" if metric.name in _EXACT else "#.8g"
        row += [f"{metric.steps[metric.first_index]:,}"]
        row += [f"{values[metric.first_index]:{digits}}" for values in (metric.a, metric.b)]
        permanent = metric.permanent_index
        row += [f"{metric.steps[permanent]:,}" if permanent is not None else "never"]
    return row + [""] * (columns - len(row))


def _format_difference(difference: float) -> str:
    return "NaN" if difference == np.inf else f"{difference:.1e}" if difference else "0"


def _format_steps(steps: Iterable[int], all_steps: Iterable[int] = ()) -> str:
    """Steps as ranges, such as "1 to 9, 11"; of more than four, the first two and the last.

    With `all_steps`, numbers that are not among them do not interrupt a range.
    """
    steps = sorted(steps)
    position = {step: number for number, step in enumerate(sorted(all_steps) or steps)}
    groups: list[list[int]] = []
    for step in steps:
        if groups and position[step] == position[groups[-1][-1]] + 1:
            groups[-1].append(step)
        else:
            groups.append([step])
    ranges = [f"{g[0]:,}" + (f" to {g[-1]:,}" if len(g) > 1 else "") for g in groups]
    return ", ".join(ranges if len(ranges) <= 4 else [*ranges[:2], "...", ranges[-1]])


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines: first column left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("   ".join([name.ljust(widths[0]), *aligned]).rstrip())
    return lines


# --- Plot ----------------------------------------------------------------------------------------

_MAX_DIFFERENCE = 2.0  # of two finite numbers


def draw_comparison(comparison: RunComparison, out: Path) -> None:
    """Plot loss and gradient norm of both runs, and below them the relative differences.

    Raises ConfigError without matplotlib, or if `out` cannot be written.
    """
    figure = new_figure(11, 6.4, layout="constrained")
    shape = {"height_ratios": [4, 3], "hspace": 0.08}
    panels = figure.subplots(2, 2, sharex=True, gridspec_kw=shape)
    metrics, titles = comparison.metrics[:2], ("loss, nats per token", "gradient norm")
    top = max(1e-7, comparison.tolerance, *(metric.difference.max() for metric in metrics))
    for metric, title, (upper, lower) in zip(metrics, titles, panels.T, strict=True):
        style_panel(upper)
        style_panel(lower)
        lines = _plot_values(upper, [run[metric.name] for run in comparison.runs])
        lines += _plot_difference(lower, metric)
        lower.set_ylim(0, 4 * min(top, _MAX_DIFFERENCE))  # the same on both sides
        upper.set_title(title, loc="left", color=INK, fontsize=10)
        lower.set_xlabel("step", color=INK)
        if metric.first_index is not None:
            first = metric.steps[metric.first_index]
            for panel in (upper, lower):
                panel.axvline(first, color=_DIFFERENCE_COLOUR, linewidth=1.0, zorder=0.9)
    lower.xaxis.get_major_locator().set_params(integer=True)
    lower.xaxis.set_major_formatter("{x:,.0f}")
    _draw_heading(figure, comparison, lines)
    save_figure(figure, out)


def _plot_values(panel, runs: Sequence[dict[int, float]]) -> list:
    thick = {"color": BLUE, "linewidth": 2.2, "markersize": 7}
    thin = {"color": RED, "linewidth": 1.1, "markersize": 3.5, "linestyle": (0, (4, 3))}
    lines = []
    for values, style in zip(runs, (thick, thin), strict=True):
        steps = sorted(values)
        lines += panel.plot(steps, [values[step] for step in steps], marker=_marker(steps), **style)
    return lines


def _plot_difference(panel, metric: MetricComparison) -> list:
    difference = np.minimum(metric.difference, _MAX_DIFFERENCE)
    beyond = metric.difference > metric.tolerance
    unclipped = {"clip_on": False, "zorder": 3}  # visible at 0 too, the edge of the panel
    style = {"linewidth": 0.9, "marker": _marker(difference), "markersize": 3}
    panel.plot(metric.steps, difference, color=FAINT, **style, **unclipped)
    size = 7 if _marker(difference) else 4
    points = metric.steps[beyond], difference[beyond]
    panel.plot(*points, ".", color=_DIFFERENCE_COLOUR, markersize=size, zorder=4)
    panel.set_yscale("symlog", linthresh=1e-8, linscale=0.5)  # logarithmic, but includes 0
    summary = f"at most {_format_difference(metric.difference.max())}"
    if metric.first_index is not None:
        summary = f"first beyond tolerance at step {metric.steps[metric.first_index]:,}"
    panel.set_title(f"relative difference, {summary}", loc="left", color=INK, fontsize=10)
    dotted = {"color": INK, "linewidth": 1.0, "linestyle": (0, (1, 2))}
    return [panel.axhline(metric.tolerance, **dotted, **unclipped)]


def _marker(points: Sequence) -> str:
    return "o" if len(points) < 30 else ""


def _draw_heading(figure, comparison: RunComparison, lines: list) -> None:
    a, b = (_shorten(str(path)) for path in comparison.paths)
    legend = figure.legend(
        lines,
        [f"A  {a}", f"B  {b}", "tolerance"],
        title=verdict(comparison),
        title_fontsize=12,
        loc="outside upper left",
        alignment="left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )
    for text in (legend.get_title(), *legend.get_texts()):
        text.set(color=INK, parse_math=False)  # a $ in a path is literal


def _shorten(path: str, length: int = 48) -> str:
    return path if len(path) <= length else f"…{path[1 - length :]}"
