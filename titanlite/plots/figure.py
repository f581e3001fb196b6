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
    """A white figure of so many inches; raises ConfigError without matplotlib."""
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


def fitting(words: str, width: float, height: float, most: float, least: float) -> float:
    """The largest size in points at which `words` fit into so many inches; 0: not even `least`."""
    size = min(most, 72 * 0.8 * height, most * width / width_of(words, most))
    return size if size >= least else 0.0


def wrapped(words: str, size: float, width: float) -> list[str]:
    """`words` in lines of at most `width` inches; a word longer than a line is broken."""
    lines = [" ".join(words.split())]
    letters = min(len(words), int(width / width_of("i", size)))
    while letters and any(width_of(line, size) > width for line in lines):
        lines = textwrap.wrap(words, letters, break_on_hyphens=False)
        letters -= 1
    return lines


def write(axes, x: float, y: float, words: str, size: float, colour: Any = INK, **how: Any) -> None:
    """`words` as they are, a $ among them too, centred on the height `y`."""
    how = {"va": "center_baseline", "parse_math": False, **how}
    axes.text(x, y, words, fontsize=size, color=colour, **how)


class Box(NamedTuple):
    """A box from its lower left corner, and the radius of its upper and of its lower corners."""

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
    # not add_patch, which takes seconds to find the limits of what is drawn
    axes.add_artist(PathPatch(path, **{"facecolor": colour, "linewidth": 0, **how}))


def _outline(x, y, width, height, upper, lower) -> list[tuple[float, float, int]]:
    """Points and matplotlib's codes: 1 moves the pen, 2 draws, 3 bends, 79 closes."""
    right, top = x + width, y + height
    if not upper and not lower:
        return [(x, top, 1), (right, top, 2), (right, y, 2), (x, y, 2), (x, top, 79)]
    start = [(x + upper, top, 1), (right - upper, top, 2)]
    down = [(right, top, 3), (right, top - upper, 3), (right, y + lower, 2)]
    back = [(right, y, 3), (right - lower, y, 3), (x + lower, y, 2)]
    up = [(x, y, 3), (x, y + lower, 3), (x, top - upper, 2)]
    return [*start, *down, *back, *up, (x, top, 3), (x + upper, top, 3), (x + upper, top, 79)]


def fill_cells(axes, cells: Iterable[tuple[float, float, Sequence[str]]], side: float) -> None:
    """Rounded squares from their lower left corners, each in bands of its colours from the top."""
    bands: dict[str, list[Box]] = defaultdict(list)
    for x, y, colours in cells:
        high = side / len(colours)
        bend = min(0.18 * side, high) if side > 0.06 else 0.0  # too small to be seen
        for number, colour in enumerate(colours):
            upper = bend if number == 0 else 0.0
            lower = bend if number == len(colours) - 1 else 0.0
            bands[colour].append(Box(x, y + side - (number + 1) * high, side, high, upper, lower))
    for colour, boxes in bands.items():
        fill(axes, boxes, colour)


Sign = Sequence[tuple[Box, Any]]  # boxes from (0, 0) on, each with its colour or how to fill it


def draw_key(axes, top: float, width: float, items: Sequence[tuple[str, Sign]]) -> float:
    """Signs and what they mean, in as many lines as they need; returns the bottom."""
    tallest = max(box.y + box.height for _, sign in items for box, _ in sign)
    line = max(0.26, tallest + 0.06)
    x, y = 0.0, top - line / 2
    for words, sign in items:
        wide = max(box.x + box.width for box, _ in sign)
        high = max(box.y + box.height for box, _ in sign)
        whole = wide + 0.08 + width_of(words, 9)
        if x and x + whole > width:
            x, y = 0.0, y - line
        for box, colour in sign:
            how = colour if isinstance(colour, dict) else {"facecolor": colour}
            fill(axes, [box._replace(x=x + box.x, y=y - high / 2 + box.y)], None, **how)
        write(axes, x + wide + 0.08, y, words, 9)
        x += whole + 0.3
    return y - line / 2
