"""A picture of how ranks share the work: who is whose neighbour, what each holds, when it idles."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlite.errors import DataError
from titanlite.observe.figure import (
    FAINT,
    GRID,
    INK,
    Box,
    draw_key,
    fill,
    fill_cells,
    fitting,
    new_figure,
    width_of,
    wrapped,
    write,
)
from titanlite.observe.gantt import Action, Timeline, draw_gantt, draw_gantt_key

__all__ = ["Action", "Place", "Stage", "Timeline", "draw_layout"]

_WIDTH, _MARGIN = 10.6, 0.35  # inches; the page begins at height 0 and goes down
_CELL = 0.42  # inches of a rank where there is room
_MOST = 16384  # ranks in one picture
_PAD, _BETWEEN, _LINE = 0.12, 0.14, 0.17  # inches within and between panels, and of their headings
_DEGREES = ("pipeline", "replicate", "shard", "context", "tensor")
_PANEL = "#f4f5f7"


@dataclass(frozen=True)
class Place:
    """A rank, and its coordinates in the mesh, from 0."""

    rank: int
    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Stage:
    """A part of the model; one that is not cut is one stage."""

    number: int
    pipeline: int  # the pipeline rank that holds it
    holds: str  # such as "tok_embeddings, layers 0-3"
    share: float  # of the cost of the whole model, 0 to 1


def draw_layout(
    title: str,
    places: Sequence[Place],
    stages: Sequence[Stage],
    timelines: Sequence[Timeline],
    out: Path,
) -> list[Path]:
    """Writes `out`.png and `out`.svg: the ranks, what each stage holds, and the timelines if any.

    The same input makes the same files. Raises DataError for a timeline of other stages than
    `stages`; ConfigError without matplotlib.
    """
    figure = new_figure(_WIDTH, 1.0)
    from matplotlib import rc_context

    held = _stages_of_ranks(places, stages)
    _check(timelines, held)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "titanlite", "hatch.linewidth": 0.7}):
        colours = _stage_colours(stages)
        sheet = figure.add_axes((0, 0, 1, 1))
        sheet.axis("off")
        y = 0.0
        for line in wrapped(title, 14, _WIDTH):
            write(sheet, 0, y - 0.12, line, 14)
            y -= 0.3
        y = _draw_ranks(sheet, y - 0.1, places, held, colours)
        y = _draw_stages(sheet, y - 0.3, stages, colours)
        if timelines:
            y = draw_gantt_key(sheet, y - 0.35, _WIDTH, timelines, held)
        for timeline in timelines:
            y = draw_gantt(sheet, y - 0.2, _WIDTH, timeline, held, colours)
        return _save(figure, sheet, y, out)


def _save(figure, sheet, bottom: float, out: Path) -> list[Path]:
    figure.set_size_inches(_WIDTH + 2 * _MARGIN, 2 * _MARGIN - bottom)
    sheet.set(xlim=(-_MARGIN, _WIDTH + _MARGIN), ylim=(bottom - _MARGIN, _MARGIN))
    out.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (out.with_name(f"{out.name}.{kind}") for kind in ("png", "svg"))
    figure.savefig(png)
    figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def _stages_of_ranks(places: Sequence[Place], stages: Sequence[Stage]) -> list[list[int]]:
    """The stages of each pipeline rank, in order."""
    ranks = 1 + max(place.pipeline for place in places)
    held = [sorted(s.number for s in stages if s.pipeline == rank) for rank in range(ranks)]
    if not all(held):
        raise DataError(f"Pipeline rank {held.index([])} holds no stage.")
    return held


def _check(timelines: Sequence[Timeline], held: list[list[int]]) -> None:
    for timeline in timelines:
        ran = [sorted({action.stage for action in actions}) for actions in timeline.ranks]
        if ran != held:
            raise DataError(
                f'Timeline "{timeline.name}": its ranks run stages {ran}, but hold {held}.'
            )


def _stage_colours(stages: Sequence[Stage]) -> dict[int, str]:
    """From blue to yellow and ever lighter, so that every eye sees their order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    numbers = sorted(stage.number for stage in stages)
    along = np.linspace(0.12, 1.0, len(numbers)) if len(numbers) > 1 else [0.45]
    pale = 0.42 + 0.58 * colormaps["viridis"](along)[:, :3]  # ink is legible on all of them
    return {number: to_hex(colour) for number, colour in zip(numbers, pale, strict=True)}


class _Level(NamedTuple):
    """The blocks of one degree, so many across and the rest below; all in cells."""

    degree: str
    count: int
    across: int
    gap: float
    block: tuple[float, float]  # the width and height of one

    def at(self, index: int) -> tuple[float, float]:
        """Where block `index` begins, from the left and from the top."""
        down, right = divmod(index, self.across)
        return right * (self.block[0] + self.gap), down * (self.block[1] + self.gap)

    @property
    def size(self) -> tuple[float, float]:
        right, down = self.at(self.across - 1)[0], self.at(self.count - 1)[1]
        return right + self.block[0], down + self.block[1]


def _levels(counts: dict[str, int], shards: int, copies: int) -> list[_Level]:
    """Tensor neighbours touch and every wider degree lies further apart, within one pipeline rank;
    so many shards and so many copies stand across."""
    tensor = _Level("tensor", counts["tensor"], counts["tensor"], 0.05, (1.0, 1.0))
    context = _Level("context", counts["context"], counts["context"], 0.3, tensor.size)
    apart = 0.6 if shards > 1 and counts["context"] > 1 else 0.3
    shard = _Level("shard", counts["shard"], shards, apart, context.size)
    return [tensor, context, shard, _Level("replicate", counts["replicate"], copies, 1.0, shard.size)]


class _Grid(NamedTuple):
    """A panel for each pipeline rank, so many across."""

    levels: list[_Level]
    across: int
    cell: float  # inches
    panel: tuple[float, float]  # inches of what is in one


def _arranged(counts: dict[str, int], headings: list[list[str]], high: float = 6.5) -> _Grid:
    """The arrangement with the largest cells that fits the page; where several have them, the one
    with data parallel ranks below each other and panels beside each other."""
    titles = _LINE * len(headings[0])
    least = max((width_of(line, 8.5) for lines in headings for line in lines), default=0.0)
    choices = []
    ways = (_ways(counts[name]) for name in ("shard", "replicate", "pipeline"))
    for shards, copies, across in product(*ways):
        levels = _levels(counts, shards, copies)
        wide, tall = levels[-1].size
        room_x = (_WIDTH + _BETWEEN) / across - _BETWEEN - 2 * _PAD
        room_y = (high + _BETWEEN) / math.ceil(counts["pipeline"] / across) - _BETWEEN - 2 * _PAD
        cell = min(_CELL, room_x / wide, (room_y - titles) / tall)
        if cell > 0.02 and room_x >= least:
            even = counts["shard"] % shards == 0 and counts["replicate"] % copies == 0
            rows = -shards if levels[1].size[0] > 1 else shards
            stacks = -copies if levels[2].size[0] > 1 else copies
            panel = max(cell * wide, least), cell * tall + titles
            likes = int(cell / 0.03), even, rows, stacks, across
            choices.append((likes, _Grid(levels, across, cell, panel)))
    if not choices:  # a very long pipeline takes a longer page
        return _arranged(counts, headings, 2 * high)
    return max(choices, key=lambda choice: choice[0])[1]


def _ways(count: int) -> list[int]:
    """How many of `count` can stand across: the least for each number of rows."""
    return sorted({math.ceil(count / rows) for rows in range(1, count + 1)})


def _counts(places: Sequence[Place]) -> dict[str, int]:
    return {name: 1 + max(getattr(place, name) for place in places) for name in _DEGREES}


def _shown(places: Sequence[Place]) -> list[Place]:
    """All places, or as many whole data parallel ranks of them as a picture can show."""
    counts = _counts(places)
    one = len(places) // (counts["replicate"] * counts["shard"])
    in_order = sorted(places, key=lambda p: (p.replicate, p.shard, p.pipeline, p.context, p.tensor))
    return in_order[: _MOST // one * one or _MOST]


def _draw_ranks(sheet, top: float, places, held, colours) -> float:
    """Every rank in the panel of its pipeline rank, under what directions mean; returns the bottom."""
    shown = _shown(places)
    counts = _counts(shown)
    panels = [[p for p in shown if p.pipeline == n] for n in range(counts["pipeline"])]
    widest = str(max(place.rank for place in shown))
    grid = _arranged(counts, _headings(panels, held, ends=False))
    size = fitting(widest, 0.86 * grid.cell, grid.cell, 9, 4.5)
    headings = _headings(panels, held, ends=not size)
    if not size:
        grid = _arranged(counts, headings)
    y = _draw_directions(sheet, top, _counts(places), grid)
    if len(shown) < len(places):
        words = f"Shown: {len(shown):,} of {len(places):,} ranks. The others repeat them."
        write(sheet, 0, y - 0.1, words, 8.5, FAINT)
        y -= 0.2
    cells, y = [], y - 0.1
    wide, tall = grid.panel[0] + 2 * _PAD, grid.panel[1] + 2 * _PAD
    for number, panel in enumerate(panels):
        down, right = divmod(number, grid.across)
        left, head = right * (wide + _BETWEEN), y - down * (tall + _BETWEEN)
        fill(sheet, [Box(left, head - tall, wide, tall, 0.06, 0.06)], _PANEL)
        for line, words in enumerate(headings[number]):
            colour = FAINT if line else INK
            write(sheet, left + _PAD, head - _PAD - _LINE * line - 0.06, words, 8.5, colour)
        head -= _PAD + _LINE * len(headings[number])
        for place in panel:
            corners = [level.at(getattr(place, level.degree)) for level in grid.levels]
            across, below = (grid.cell * sum(steps) for steps in zip(*corners, strict=True))
            x, floor = left + _PAD + across, head - below - grid.cell
            cells.append((x, floor, [colours[stage] for stage in held[number]]))
            if size:
                middle = x + grid.cell / 2, floor + grid.cell / 2
                write(sheet, *middle, str(place.rank), size, ha="center")
    fill_cells(sheet, cells, grid.cell)
    rows = math.ceil(len(panels) / grid.across)
    return y - rows * (tall + _BETWEEN) + _BETWEEN


def _headings(panels: list[list[Place]], held: list[list[int]], ends: bool) -> list[list[str]]:
    """The lines over each panel; `ends`: with its first and last rank, which its cells cannot show."""
    lines: list[list[str]] = [[] for _ in panels]
    for mine, panel, stages in zip(lines, panels, held):
        if len(panels) > 1:
            numbers = ", ".join(map(str, stages))
            mine += [f"pipeline {panel[0].pipeline}", f"stage{'s' * (len(stages) > 1)} {numbers}"]
        if ends:
            mine.append(f"ranks {panel[0].rank} … {panel[-1].rank}")
    return lines


def _draw_directions(sheet, top: float, counts: dict[str, int], grid: _Grid) -> float:
    """A key of the degrees above 1: two neighbours of each, as they lie; returns its bottom."""
    side = 0.1
    signs = []
    if counts["pipeline"] > 1:
        panels = [(Box(x, 0, 0.17, 0.2, 0.03, 0.03), GRID) for x in (0, 0.21)]
        signs.append((f"pipeline {counts['pipeline']}", panels))
    for level in reversed(grid.levels):
        if counts[level.degree] > 1:
            step = side * (1 + level.gap)
            right = [0, 1] if level.across > 1 else [0]
            down = [0, 1] if level.across < level.count else [0]
            cells = [(Box(step * i, step * j, side, side, 0.02, 0.02), FAINT) for i, j in product(right, down)]
            signs.append((f"{level.degree} {counts[level.degree]}", cells))
    return draw_key(sheet, top, _WIDTH, signs) if signs else top


def _draw_stages(sheet, top: float, stages: Sequence[Stage], colours: dict[int, str]) -> float:
    """What each stage holds and costs, beside its colour; returns the bottom."""
    in_order = sorted(stages, key=lambda stage: stage.number)
    before, after = 0.42, 1.35  # inches of the swatch, and of the share
    widest = max(width_of(stage.holds, 8.5) for stage in stages)
    fit = int((_WIDTH + 0.3) / (before + widest + after + 0.3))
    columns = max(1, min(fit, math.ceil(len(stages) / 8)))
    words = min(widest, _WIDTH / columns - before - after - 0.3 * (columns > 1))
    rows = math.ceil(len(stages) / columns)
    lowest = top
    for column in range(columns):
        x, y = column * (before + words + after + 0.3), top
        for stage in in_order[column * rows : (column + 1) * rows]:
            lines = wrapped(stage.holds, 8.5, words)
            middle = y - 0.11
            fill(sheet, [Box(x, middle - 0.09, 0.32, 0.18, 0.04, 0.04)], colours[stage.number])
            write(sheet, x + 0.16, middle, str(stage.number), 8, ha="center")
            for line in lines:
                write(sheet, x + before, y - 0.11, line, 8.5)
                y -= 0.16
            y -= 0.08
            ...
        lowest = min(lowest, y)
    return lowest
