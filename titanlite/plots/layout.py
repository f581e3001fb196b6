"""A picture of how ranks share the work: who is whose neighbour, what each holds, when it idles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlite.errors import ConfigError, DataError
from titanlite.plots.figure import (
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
from titanlite.plots.gantt import DrawnAction, DrawnTimeline, draw_gantt, draw_gantt_key

__all__ = ["DrawnAction", "MeshCoordinate", "StageCost", "DrawnTimeline", "draw_layout"]

_WIDTH, _MARGIN = 10.6, 0.35  # inches; the page begins at height 0 and goes down
_CELL = 0.42  # inches of a rank where there is room
_MOST = 4096  # ranks in one picture
_PAD, _BETWEEN, _LINE = 0.12, 0.14, 0.19  # inches within and between panels, and of their headings
_DEGREES = ("pipeline", "replicate", "shard", "context", "tensor")
_PANEL = "#f4f5f7"


@dataclass(frozen=True)
class MeshCoordinate:
    """A rank, and its coordinates in the mesh, from 0."""

    rank: int
    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class StageCost:
    """A part of the model; one that is not cut is one stage."""

    number: int
    pipeline: int  # the pipeline rank that holds it
    holds: str  # such as "tok_embeddings, layers 0-3"
    share: float  # of the cost of the whole model, 0 to 1


def draw_layout(
    title: str,
    places: Sequence[MeshCoordinate],
    stages: Sequence[StageCost],
    timelines: Sequence[DrawnTimeline],
    out: Path,
) -> list[Path]:
    """Writes `out`.png and `out`.svg: the ranks, what each stage holds, and the timelines if any.

    The same input makes the same files. Raises DataError for a pipeline rank without a stage, and
    for a timeline of other stages than its ranks hold; ConfigError without matplotlib.
    """
    figure = new_figure(_WIDTH, 1.0)
    from matplotlib import rc_context

    held = _held(places, stages, timelines)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "titanlite", "hatch.linewidth": 0.7}):
        colours = _stage_colours(stages)
        sheet = figure.add_axes((0, 0, 1, 1))
        sheet.axis("off")
        y = 0.0
        for line in wrapped(title, 14, _WIDTH):
            write(sheet, 0, y - 0.12, line, 14)
            y -= 0.3
        ranks = _draw_ranks(sheet, y - 0.1, places, held, colours)
        y = _draw_stages(sheet, ranks, stages, colours)
        if timelines:
            y = draw_gantt_key(sheet, y - 0.35, _WIDTH, timelines, held)
        for timeline in timelines:
            y = draw_gantt(sheet, y - 0.2, _WIDTH, timeline, held, colours)
        figure.set_size_inches(_WIDTH + 2 * _MARGIN, 2 * _MARGIN - y)  # now that it is known
        sheet.set(xlim=(-_MARGIN, _WIDTH + _MARGIN), ylim=(y - _MARGIN, _MARGIN))
        png, svg = (out.parent / f"{out.name}.{kind}" for kind in ("png", "svg"))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(png)
            figure.savefig(svg, metadata={"Date": None})
        except OSError as error:
            raise ConfigError(
                f"{png}: cannot be written ({error.strerror}).", fix="Give another --out."
            ) from None
    return [png, svg]


def _held(
    places, stages: Sequence[StageCost], timelines: Sequence[DrawnTimeline]
) -> list[list[int]]:
    """The stages of each pipeline rank, in order; raises DataError where timelines know others."""
    ranks = range(1 + max(place.pipeline for place in places))
    held = [sorted(s.number for s in stages if s.pipeline == rank) for rank in ranks]
    if not all(held):
        raise DataError(f"Pipeline rank {held.index([])} holds no stage.")
    for timeline in timelines:
        ran = [sorted({action.stage for action in actions}) for actions in timeline.ranks]
        if ran != held:
            raise DataError(
                f'Timeline "{timeline.name}": pipeline ranks run stages {ran}, but hold {held}.',
                fix="Draw it with the settings that it was made with.",
            )
    return held


def _stage_colours(stages: Sequence[StageCost]) -> dict[int, str]:
    """From purple to yellow and ever lighter, so that every eye sees their order."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    numbers = sorted(stage.number for stage in stages)
    along = np.linspace(0.12, 1.0, len(numbers)) if len(numbers) > 1 else [0.45]
    pale = 0.44 + 0.56 * colormaps["viridis"](along)[:, :3]  # ink is legible on all of them
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
    """The ranks of a panel: tensor neighbours touch, and every wider degree lies further apart; so
    many shards and so many copies stand across."""
    tensor = _Level("tensor", counts["tensor"], counts["tensor"], 0.04, (1.0, 1.0))
    context = _Level("context", counts["context"], counts["context"], 0.35, tensor.size)
    apart = 0.7 if shards > 1 and counts["context"] > 1 else 0.35
    shard = _Level("shard", counts["shard"], shards, apart, context.size)
    replicate = _Level("replicate", counts["replicate"], copies, 1.0, shard.size)
    return [tensor, context, shard, replicate]


class _Grid(NamedTuple):
    """A panel for each pipeline rank, so many across, under headings of one line or more."""

    levels: list[_Level]
    across: int
    cell: float  # inches
    panel: tuple[float, float]  # inches of what is in one
    lines: int  # of a heading


def _arranged(counts: dict[str, int], headings: list[list[str]], high: float = 6.5) -> _Grid:
    """The arrangement with the largest cells that fits the page; where several have them, the one
    with data parallel ranks below each other and panels beside each other."""
    parts = len(headings[0])
    choices = []
    ways = (_ways(counts[name]) for name in ("shard", "replicate", "pipeline"))
    for shards, copies, across, lines in product(*ways, {min(1, parts), parts}):
        levels = _levels(counts, shards, copies)
        wide, tall = levels[-1].size
        least = max(_width_of_heading(heading, lines) for heading in headings)
        room_x = (_WIDTH + _BETWEEN) / across - _BETWEEN - 2 * _PAD
        room_y = (high + _BETWEEN) / math.ceil(counts["pipeline"] / across) - _BETWEEN - 2 * _PAD
        cell = min(_CELL, room_x / wide, (room_y - _LINE * lines) / tall)
        if cell > min(0.02, 0.9 * _WIDTH / wide) and room_x >= least:
            panel = max(cell * wide, least), cell * tall + _LINE * lines
            grid = _Grid(levels, across, cell, panel, lines)
            choices.append((_likes(grid, counts), grid))
    if not choices:  # a very long pipeline takes a longer page
        return _arranged(counts, headings, 2 * high)
    return max(choices, key=lambda choice: choice[0])[1]


def _likes(grid: _Grid, counts: dict[str, int]) -> tuple:
    """What makes an arrangement better than another, most important first."""
    shard, replicate = grid.levels[2:]
    across = shard.across, replicate.across, grid.across
    every = shard.count, replicate.count, counts["pipeline"]
    even = not any(count % some for count, some in zip(every, across, strict=True))
    return (
        int(grid.cell * (1 if even else 0.75) / 0.02),
        even,
        -shard.across if shard.block[0] > 1 else shard.across,  # what is wide goes below each other
        -replicate.across if replicate.block[0] > 1 else replicate.across,
        grid.panel[0] < grid.cell * replicate.size[0] + 0.01,  # no blank beside the cells
        grid.across,
        -grid.lines,
    )


def _ways(count: int) -> list[int]:
    """How many of `count` can stand across: the least for each number of rows."""
    return sorted({math.ceil(count / rows) for rows in range(1, count + 1)})


def _width_of_heading(parts: list[str], lines: int) -> float:
    widths = [width_of(part, 8.5) for part in parts]
    return max(widths, default=0.0) if lines != 1 else sum(widths) + 0.15 * (len(widths) - 1)


def _draw_ranks(sheet, top: float, places: Sequence[MeshCoordinate], held, colours) -> Box:
    """Every rank in the panel of its pipeline rank, under a key of directions; returns where."""
    shown = _shown(places)
    panels = [[p for p in shown if p.pipeline == n] for n in range(len(held))]
    grid, headings, size = _legible(panels, held)
    top = _draw_directions(sheet, top, _counts(places), grid)
    if len(shown) < len(places):
        words = f"Shown: {len(shown):,} of {len(places):,} ranks; the data parallel rest is alike."
        write(sheet, 0, top - 0.1, words, 8.5, FAINT)
        top -= 0.2
    top -= 0.1
    wide, tall = grid.panel[0] + 2 * _PAD, grid.panel[1] + 2 * _PAD
    for number, (panel, heading) in enumerate(zip(panels, headings, strict=True)):
        down, right = divmod(number, grid.across)
        left, head = right * (wide + _BETWEEN), top - down * (tall + _BETWEEN)
        fill(sheet, [Box(left, head - tall, wide, tall, 0.06, 0.06)], _PANEL)
        mine = [colours[stage] for stage in held[number]]
        _draw_panel(sheet, left + _PAD, head - _PAD, panel, heading, mine, grid, size)
    down, right = math.ceil(len(panels) / grid.across), min(len(panels), grid.across)
    width, height = right * (wide + _BETWEEN) - _BETWEEN, down * (tall + _BETWEEN) - _BETWEEN
    return Box(0, top - height, width, height)


def _draw_panel(sheet, left, top, panel, heading, colours, grid: _Grid, size: float) -> None:
    x, y = left, top
    for number, part in enumerate(heading):
        write(sheet, x, y - 0.06, part, 8.5, FAINT if number else INK)
        if grid.lines == 1:
            x += width_of(part, 8.5) + 0.15
        else:
            y -= _LINE
    cells = []
    for place in panel:
        steps = [level.at(getattr(place, level.degree)) for level in grid.levels]
        right, down = (grid.cell * sum(step) for step in zip(*steps, strict=True))
        x, y = left + right, top - _LINE * grid.lines - down - grid.cell
        cells.append((x, y, colours))
        if size:
            write(sheet, x + grid.cell / 2, y + grid.cell / 2, str(place.rank), size, ha="center")
    fill_cells(sheet, cells, grid.cell)


def _legible(panels: list[list[MeshCoordinate]], held) -> tuple[_Grid, list[list[str]], float]:
    """The arrangement, the headings of panels, and the size of the numbers in cells: 0 where they
    would be too small, and headings tell the first and last."""
    counts = _counts([place for panel in panels for place in panel])
    widest = str(max(place.rank for panel in panels for place in panel))
    headings: list[list[str]] = [[] for _ in panels]
    if len(panels) > 1:
        for number, (heading, stages) in enumerate(zip(headings, held, strict=True)):
            several = [*stages[:3], f"… {stages[-1]}"] if len(stages) > 8 else stages
            word = "stage" if len(stages) == 1 else "stages"
            heading += [f"pipeline {number}", f"{word} {', '.join(map(str, several))}"]
    grid = _arranged(counts, headings)
    size = fitting(widest, 0.86 * grid.cell, grid.cell, 9, 4.5)
    if not size:
        for heading, panel in zip(headings, panels, strict=True):
            heading.append(f"ranks {panel[0].rank} … {panel[-1].rank}")
        grid = _arranged(counts, headings)
    return grid, headings, size


def _counts(places: Sequence[MeshCoordinate]) -> dict[str, int]:
    return {name: 1 + max(getattr(place, name) for place in places) for name in _DEGREES}


def _shown(places: Sequence[MeshCoordinate]) -> list[MeshCoordinate]:
    """All places, or as many whole data parallel ranks of them as a picture can show."""
    counts = _counts(places)
    one = len(places) // (counts["replicate"] * counts["shard"])
    in_order = sorted(places, key=lambda p: (p.replicate, p.shard, p.pipeline, p.context, p.tensor))
    return in_order[: max(1, _MOST // one) * one]


def _draw_directions(sheet, top: float, counts: dict[str, int], grid: _Grid) -> float:
    """A key of the degrees above 1: two neighbours of each, as they lie; returns its bottom."""
    signs = []
    if counts["pipeline"] > 1:
        panels = [(Box(x, 0, 0.2, 0.2, 0.03, 0.03), GRID) for x in (0, 0.24)]
        signs.append((f"pipeline {counts['pipeline']}", panels))
    for level in reversed(grid.levels):
        if counts[level.degree] > 1:
            right = range(1 + (level.across > 1))
            down = range(1 + (level.across < counts[level.degree]))
            step = 0.12 * (1 + level.gap)
            cells = [
                (Box(step * i, step * j, 0.12, 0.12, 0.02, 0.02), FAINT)
                for i, j in product(right, down)
            ]
            signs.append((f"{level.degree} {counts[level.degree]}", cells))
    return draw_key(sheet, top, _WIDTH, signs) if signs else top


def _draw_stages(sheet, ranks: Box, stages: Sequence[StageCost], colours: dict[int, str]) -> float:
    """What each stage holds, and its share of the cost; beside the ranks where there is room, or
    below; returns the bottom of both."""
    before, after, apart = 0.4, 1.12, 0.3  # inches: of the swatch, of the share, between columns
    widest = max(width_of(stage.holds, 8.5) for stage in stages)
    left, top, room = ranks.width + 0.4, ranks.y + ranks.height, _WIDTH - ranks.width - 0.4
    columns = math.ceil(len(stages) / 8)
    if (room + apart) / columns < before + widest + after + apart:
        left, top, room = 0.0, ranks.y - 0.3, _WIDTH
        fit = int((_WIDTH + apart) / (before + widest + after + apart))
        columns = min(columns, max(3, fit))
    words = min(widest, (room + apart) / columns - before - after - apart)
    rows = math.ceil(len(stages) / columns)
    dearest = max(stage.share for stage in stages) or 1.0
    lowest = ranks.y
    for place, stage in enumerate(sorted(stages, key=lambda stage: stage.number)):
        column, row = divmod(place, rows)
        x, y = left + column * (before + words + after + apart), y - 0.1 if row else top
        colour = colours[stage.number]
        fill(sheet, [Box(x, y - 0.17, 0.3, 0.17, 0.03, 0.03)], colour)
        write(sheet, x + 0.15, y - 0.085, str(stage.number), 8, ha="center")
        share = Box(x + before + words + 0.12, y - 0.14, 0.44 * stage.share / dearest, 0.11)
        fill(sheet, [share], colour)
        percent = f"{100 * stage.share:.1f} %"
        write(sheet, x + before + words + after, y - 0.085, percent, 8.5, FAINT, ha="right")
        for line in wrapped(stage.holds, 8.5, words):
            write(sheet, x + before, y - 0.085, line, 8.5)
            y -= 0.16
        lowest = min(lowest, y)
    return lowest
