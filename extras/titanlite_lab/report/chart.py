"""Line charts as HTML and SVG without external scripts; text keeps its size on a phone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

MAX_POINTS = 700  # of one line; more are not visible
TICKS = 5  # about that many on an axis
SIZE = 1000  # of the coordinates inside the SVG, which is stretched to the width of the page


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart. Points whose y is not finite are gaps."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]  # (x, y), x increases
    faint: bool = False  # drawn behind the others, thin
    dashed: bool = False


@dataclass(frozen=True)
class ChartMarker:
    """An event at a position on the x axis."""

    x: float
    text: str
    colour: str


@dataclass(frozen=True)
class Chart:
    """A titled chart of lines over the steps of runs."""

    title: str
    lines: Sequence[ChartLine]
    markers: Sequence[ChartMarker] = ()
    log: bool = False  # logarithmic y axis
    unit: str = ""
    from_zero: bool = False
    high_quantile: float = (
        1.0  # points above this quantile may be cut off, such as the first losses
    )
    note: str = field(default="")

    def html(self) -> str:
        """The chart as an HTML element; empty if no line has a finite point."""
        shown = [line for line in self.lines if _finite(line)]
        if not shown:
            return ""
        x_axis, y_axis = self._x_axis(shown), self._y_axis(shown)
        paths = "".join(_path(line, x_axis, y_axis) for line in shown)
        marks = "".join(_marker_html(marker, x_axis) for marker in self.markers)
        y_ticks = "".join(
            f'<i class="y" style="bottom:{100 * y_axis.place(tick):.2f}%">{format_number(tick)}</i>'
            for tick in y_axis.ticks()
        )
        x_ticks = "".join(
            f'<i class="x" style="left:{100 * x_axis.place(tick):.2f}%">{format_number(tick)}</i>'
            for tick in x_axis.ticks()
        )
        grid = "".join(
            f'<line x1="0" x2="{SIZE}" y1="{_y(y_axis, tick)}" y2="{_y(y_axis, tick)}"/>'
            for tick in y_axis.ticks()
        )
        unit = f" <small>{escape(self.unit)}</small>" if self.unit else ""
        data = escape(json.dumps(_hover_data(shown, x_axis)), quote=True)
        return (
            f"<figure><figcaption>{escape(self.title)}{unit}</figcaption>{_legend(shown)}"
            f'<div class="plot" data-points="{data}">{y_ticks}{x_ticks}{marks}'
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none">'
            f'<g class="grid">{grid}</g>{paths}</svg></div>'
            f"{f'<p>{escape(self.note)}</p>' if self.note else ''}</figure>"
        )

    def _x_axis(self, lines: Sequence[ChartLine]) -> _Axis:
        values = [x for line in lines for x, _ in _finite(line)]
        return _Axis(min(values), max(values))

    def _y_axis(self, lines: Sequence[ChartLine]) -> _Axis:
        values = sorted(y for line in lines for _, y in _finite(line) if y > 0 or not self.log)
        if not values:
            values = [1.0]
        high = values[min(len(values) - 1, math.ceil(self.high_quantile * (len(values) - 1)))]
        low = min(0.0, values[0]) if self.from_zero else values[0]
        if self.log:
            return _Axis(low / 1.2, high * 1.2, log=True)
        margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
        return _Axis(low if self.from_zero else low - margin, high + margin)


@dataclass(frozen=True)
class _Axis:
    """Maps values to fractions of the axis."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """Fraction of the axis at a value; outside values are placed at the nearest end."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            value = math.log10(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Round values on the axis."""
        if self.log and self.high > 30 * self.low:
            low, high = math.log10(self.low), math.log10(self.high)
            exponents = range(math.ceil(low), math.floor(high) + 1)
            every = max(1, len(exponents) // TICKS)
            return [10.0**exponent for exponent in exponents[::every]]
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = 10 ** math.floor(math.log10(span / TICKS))
        step *= min((m for m in (1, 2, 5, 10)), key=lambda m: abs(span / (m * step) - TICKS))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def format_number(value: float) -> str:
    """A number in few characters: 1.2M, 0.0031."""
    if not math.isfinite(value):
        return "-"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.4g}{suffix}"
    return f"{value:.4g}"


def thin_out(points: Sequence[tuple[float, float]], maximum: int) -> list[tuple[float, float]]:
    """At most about `maximum` points: the lowest and highest of each interval, so spikes stay."""
    if len(points) <= maximum:
        return list(points)
    kept: list[tuple[float, float]] = []
    size = -(-2 * len(points) // maximum)
    for start in range(0, len(points), size):
        part = points[start : start + size]
        finite = [point for point in part if math.isfinite(point[1])]
        if not finite:
            kept.append(part[0])
            continue
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _finite(line: ChartLine) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if math.isfinite(y)]


def _y(axis: _Axis, value: float) -> str:
    return f"{SIZE * (1 - axis.place(value)):.1f}"


def _path(line: ChartLine, x_axis: _Axis, y_axis: _Axis) -> str:
    commands, pen = [], "M"
    for x, y in thin_out(line.points, MAX_POINTS):
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{SIZE * x_axis.place(x):.1f} {_y(y_axis, y)}")
        pen = "L"
    if len(commands) == 1:  # a single point: a line of length 0 is drawn as a dot by its caps
        commands.append("h0")
    kind = " ".join(name for name in ("faint", "dashed") if getattr(line, name))
    return f'<path class="{kind}" stroke="{line.colour}" d="{"".join(commands)}"/>'


def _marker_html(marker: ChartMarker, axis: _Axis) -> str:
    left = 100 * axis.place(marker.x)
    return (
        f'<b class="mark" style="left:{left:.2f}%;border-color:{marker.colour}"'
        f' title="{escape(marker.text, quote=True)}"></b>'
    )


def _legend(lines: Sequence[ChartLine]) -> str:
    unique = {line.label: line.colour for line in lines if line.label}
    entries = (f'<span style="--c:{c}">{escape(label)}</span>' for label, c in unique.items())
    return f'<div class="legend">{"".join(entries)}</div>'


def _hover_data(lines: Sequence[ChartLine], x_axis: _Axis) -> list:
    """For the script of the page: (label, colour, [[fraction of the x axis, x, y], ...])."""
    return [
        [
            line.label,
            line.colour,
            [[round(x_axis.place(x), 4), x, float(f"{y:.5g}")] for x, y in points],
        ]
        for line in lines
        if line.label and not line.faint and (points := thin_out(_finite(line), MAX_POINTS // 2))
    ]
