"""Shared plotting helpers: colours, text of known width, many boxes in one path, legends."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.errors import ConfigError

INK, FAINT, GRID = "#1d2733", "#8a94a0", "#e6e9ed"


def new_figure(width: float, height: float, **options: Any):
    """A white figure, `width` x `height` inches; raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Drawing needs matplotlib, which is not installed.", fix="pip install 'titanlite[lab]'"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", **options)
    FigureCanvasAgg(figure)  # a canvas that needs no display
    return figure


def save_figure(figure, path: Path, **options: Any) -> None:
    """Write `figure` in the format of the suffix of `path`, or as PNG; raises ConfigError."""
    suffix = path.suffix[1:].lower()
    file_format = suffix if suffix in figure.canvas.get_supported_filetypes() else "png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=file_format, **options)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None


@cache
def text_width(text: str, size: float) -> float:
    """Width in inches of `text` at `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0] / 72


def fit_font_size(text: str, width: float, height: float, maximum: float, minimum: float) -> float:
    """Largest font size in points at which `text` fits into a box in inches; 0 below `minimum`."""
    size = min(maximum, 72 * 0.8 * height, maximum * width / text_width(text, maximum))
    return size if size >= minimum else 0.0


def wrap_text(text: str, size: float, width: float) -> list[str]:
    """`text` in lines of at most `width` inches; words longer than a line are broken."""
    lines = [" ".join(text.split())]
    characters = min(len(text), int(width / text_width("i", size)))
    while characters and any(text_width(line, size) > width for line in lines):
        lines = textwrap.wrap(text, characters, break_on_hyphens=False)
        characters -= 1
    return lines


def draw_text(
    axes, x: float, y: float, text: str, size: float, colour: Any = INK, **options: Any
) -> None:
    """Draw literal `text` (a $ is not math), vertically centred on `y`."""
    options = {"va": "center_baseline", "parse_math": False, **options}
    axes.text(x, y, text, fontsize=size, color=colour, **options)


class Box(NamedTuple):
    """A rectangle from its lower left corner, with the radii of its upper and lower corners."""

    x: float
    y: float
    width: float
    height: float
    upper: float = 0.0
    lower: float = 0.0


def fill_boxes(axes, boxes: Iterable[Box], colour: Any, **options: Any) -> None:
    """Fill all `boxes` as one path: thousands of separate patches would be slow and large."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    steps = [step for box in boxes for step in _outline(*box)]
    outline = Outline(np.array([step[:2] for step in steps]), [step[2] for step in steps])
    # add_artist, because add_patch takes seconds to update the limits of the axes
    axes.add_artist(PathPatch(outline, **{"facecolor": colour, "linewidth": 0, **options}))


def _outline(x, y, width, height, upper, lower) -> list[tuple[float, float, int]]:
    """Points with matplotlib's path codes: 1 MOVETO, 2 LINETO, 3 CURVE3, 79 CLOSEPOLY."""
    right, top = x + width, y + height
    if not upper and not lower:
        return [(x, top, 1), (right, top, 2), (right, y, 2), (x, y, 2), (x, top, 79)]
    start = [(x + upper, top, 1), (right - upper, top, 2)]
    down = [(right, top, 3), (right, top - upper, 3), (right, y + lower, 2)]
    back = [(right, y, 3), (right - lower, y, 3), (x + lower, y, 2)]
    up = [(x, y, 3), (x, y + lower, 3), (x, top - upper, 2)]
    return [*start, *down, *back, *up, (x, top, 3), (x + upper, top, 3), (x + upper, top, 79)]


def fill_cells(axes, cells: Iterable[tuple[float, float, Sequence[str]]], side: float) -> None:
    """Rounded squares at (x, y), each with one horizontal band per colour, from the top."""
    bands: dict[str, list[Box]] = defaultdict(list)
    for x, y, colours in cells:
        height = side / len(colours)
        radius = min(0.18 * side, height) if side > 0.06 else 0.0  # invisible on smaller cells
        for number, colour in enumerate(colours):
            upper = radius if number == 0 else 0.0
            lower = radius if number == len(colours) - 1 else 0.0
            bottom = y + side - (number + 1) * height
            bands[colour].append(Box(x, bottom, side, height, upper, lower))
    for colour, boxes in bands.items():
        fill_boxes(axes, boxes, colour)


# Boxes relative to (0, 0), each with its colour or its matplotlib patch options.
LegendSymbol = Sequence[tuple[Box, Any]]


def draw_legend(axes, top: float, width: float, items: Sequence[tuple[str, LegendSymbol]]) -> float:
    """Draw symbols with their labels in as many lines as they need; return the bottom."""
    tallest = max(box.y + box.height for _, symbol in items for box, _ in symbol)
    line_height = max(0.26, tallest + 0.06)
    x, y = 0.0, top - line_height / 2
    for label, symbol in items:
        symbol_width = max(box.x + box.width for box, _ in symbol)
        symbol_height = max(box.y + box.height for box, _ in symbol)
        item_width = symbol_width + 0.08 + text_width(label, 9)
        if x and x + item_width > width:
            x, y = 0.0, y - line_height
        for box, colour in symbol:
            options = colour if isinstance(colour, dict) else {"facecolor": colour}
            placed = box._replace(x=x + box.x, y=y - symbol_height / 2 + box.y)
            fill_boxes(axes, [placed], None, **options)
        draw_text(axes, x + symbol_width + 0.08, y, label, 9)
        x += item_width + 0.3
    return y - line_height / 2
