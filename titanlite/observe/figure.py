"""Paper and pencils of every picture: colours, words of known width, boxes by the thousand."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from titanlite.errors import ConfigError

INK, FAINT, GRID = "#1d2733", "#8a94a0", "#e6e9ed"


def new_figure(width: float, height: float, **how: Any):
    """A white figure of so many inches, without a display; raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Drawing needs matplotlib, which is not installed.", fix="pip install matplotlib"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white", **how)
    FigureCanvasAgg(figure)  # a picture without a display
    return figure


@cache
def width_of(words: str, size: float) -> float:
    """Inches that `words` are wide at `size` points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size)
    return text_to_path.get_text_width_height_descent(words, font, ismath=False)[0] / 72


def wrapped(words: str, size: float, width: float) -> list[str]:
    """`words` in lines of at most `width` inches; a word longer than a line is broken."""
    lines = [words]
    for letters in range(len(words), 0, -1):
        if all(width_of(line, size) <= width for line in lines):
            break
        lines = textwrap.wrap(words, letters)
    return lines


def write(axes, x: float, y: float, words: str, size: float, colour: Any = INK, **how: Any) -> None:
    """`words` just as they are, centred on `y` unless `how` says otherwise."""
    how = {"va": "center_baseline", **how}
    axes.text(x, y, words, fontsize=size, color=colour, parse_math=False, **how)


class Box(NamedTuple):
    """A box from its lower left corner; the radius of its upper and of its lower corners."""

    x: float
    y: float
    width: float
    height: float
    upper: float = 0.0
    lower: float = 0.0


def fill(axes, boxes: Iterable[Box], colour: Any, **how: Any) -> None:
    """All `boxes` as one path: ten thousand are drawn as fast, and written as small, as ten."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    steps = [step for box in boxes for step in _outline(*box)]
    path = Path(np.array([step[:2] for step in steps]), [step[2] for step in steps])
    axes.add_patch(PathPatch(path, **{"facecolor": colour, "linewidth": 0, **how}))


def _outline(x, y, width, height, upper, lower) -> list[tuple[float, float, int]]:
    """Points with matplotlib's codes: 1 moves the pen, 2 draws, 3 bends (twice), 79 closes."""
    right, top = x + width, y + height
    if not upper and not lower:
        return [(x, top, 1), (right, top, 2), (right, y, 2), (x, y, 2), (x, top, 79)]
    across = [(x + upper, top, 1), (right - upper, top, 2), (right, top, 3), (right, top - upper, 3)]
    down = [(right, y + lower, 2), (right, y, 3), (right - lower, y, 3)]
    back = [(x + lower, y, 2), (x, y, 3), (x, y + lower, 3)]
    up = [(x, top - upper, 2), (x, top, 3), (x + upper, top, 3), (x + upper, top, 79)]
    return across + down + back + up


def fill_cells(axes, cells: Iterable[tuple[float, float, Sequence[str]]], side: float) -> None:
    """Rounded squares from their lower left corners, each with its colours in bands from the top."""
    bands = defaultdict(list)
    for x, y, colours in cells:
        high = side / len(colours)
        for number, colour in enumerate(colours):
            upper = 0.18 * side if number == 0 else 0.0
            lower = 0.18 * side if number == len(colours) - 1 else 0.0
            below = y + side - (number + 1) * high
            bands[colour].append(Box(x, below, side, high, min(upper, high), min(lower, high)))
    for colour, boxes in bands.items():
        fill(axes, boxes, colour)


def fitting(words: str, width: float, height: float, most: float, least: float) -> float:
    """The largest size in points at which `words` fit into a box of inches; 0 if none is legible."""
    size = min(most, 72 * height * 0.8, most * width / width_of(words, most))
    return size if size >= least else 0.0


def draw_key(
    axes, top: float, width: float, items: Sequence[tuple[str, Sequence[tuple[Box, Any]]]]
) -> float:
    """A line of signs (boxes from 0, 0 on, with their colours) and their words; returns its bottom."""
    x, y = 0.0, top - 0.13
    for words, sign in items:
        wide = max(box.x + box.width for box, _ in sign)
        whole = wide + 0.08 + width_of(words, 9)
        if x and x + whole > width:
            x, y = 0.0, y - 0.28
        tall = max(box.y + box.height for box, _ in sign)
        for box, colour in sign:
            how = colour if isinstance(colour, dict) else {"facecolor": colour}
            fill(axes, [box._replace(x=x + box.x, y=y - tall / 2 + box.y)], None, **how)
        write(axes, x + wide + 0.08, y, words, 9)
        x += whole + 0.3
    return y - 0.13
