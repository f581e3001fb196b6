"""Boxes, arrows and text at positions in inches, and PNG files of a few colours."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

INK, FAINT, LINE = "#1d2733", "#5f6b78", "#9aa5b1"
BLUE, GREEN, AMBER, RED, GREY = "#dbe8f7", "#dcefe0", "#fbeccb", "#f8dcd8", "#eef0f3"
PALETTE_COLOURS = 128  # of a PNG; anti-aliased text looks the same with them


def new_canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A white figure whose coordinates are inches from its lower left corner."""
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG with a palette: a third of the size of a PNG without."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    image = Image.open(buffer).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(PALETTE_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of smaller text below it."""

    x: float  # of its left edge
    y: float  # of its lower edge
    width: float
    height: float
    title: str
    lines: Sequence[str] = ()
    colour: str = BLUE
    mono: bool = False

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + self.height / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + self.height / 2

    @property
    def top(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height

    @property
    def bottom(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y


def draw_box(axes: Axes, box: Box) -> None:
    """Draw a box; its text is centred."""
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=box.colour,
            edgecolor=LINE,
            linewidth=0.8,
        )
    )
    step, x = 0.165, box.x + box.width / 2
    y = box.y + box.height / 2 + step * len(box.lines) / 2
    family = "DejaVu Sans Mono" if box.mono else "DejaVu Sans"
    write(axes, x, y, box.title, size=9.5, weight="bold", family=family)
    for number, line in enumerate(box.lines):
        write(axes, x, y - 0.02 - step * (number + 1), line, size=8, colour=FAINT)


def write(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    size: float = 9,
    colour: str = INK,
    align: str = "center",
    **style: Any,
) -> None:
    """One line of text, centred on the height `y`."""
    axes.text(
        x, y, text, fontsize=size, color=colour, ha=align, va="center", parse_math=False, **style
    )


def draw_arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    *,
    curve: float = 0.0,
    colour: str = FAINT,
    dashed: bool = False,
) -> None:
    """An arrow; `curve` bends it, as a share of its length."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={curve}",
            arrowstyle="-|>",
            mutation_scale=10,
            linewidth=1.1,
            linestyle="--" if dashed else "-",
            color=colour,
            shrinkA=2,
            shrinkB=2,
        )
    )
