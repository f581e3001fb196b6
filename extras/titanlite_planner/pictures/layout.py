"""Plot of a parallel layout: mesh coordinates of all ranks, stages with costs, and timelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titanlite.errors import DataError
from titanlite_lab.figure import (
    FAINT,
    GRID,
    INK,
    Box,
    draw_legend,
    draw_text,
    fill_boxes,
    fill_cells,
    fit_font_size,
    new_figure,
    save_figure,
    text_width,
    wrap_text,
)
from titanlite_planner.pictures.gantt import PipelineTimeline, draw_gantt, draw_gantt_legend

# Inches. y is 0 at the top of the page and negative below.
_WIDTH, _MARGIN = 10.6, 0.35
_MAX_CELL = 0.42  # side of the square of one rank
_PADDING, _SPACING = 0.12, 0.14  # inside a panel, and between panels
_HEADING_LINE = 0.19
_MAX_RANKS = 4096  # in one plot
_DEGREES = ("pipeline", "replicate", "shard", "context", "tensor")
_PANEL_COLOUR = "#f4f5f7"


@dataclass(frozen=True)
class MeshCoordinate:
    """A rank and its coordinate in each mesh dimension, from 0."""

    rank: int
    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class StageCost:
    """A pipeline stage and its cost; without pipeline parallelism, the model is one stage."""

    number: int
    pipeline: int  # its pipeline rank
    modules: str  # such as "tok_embeddings, layers 0-3"
    fraction: float  # of the cost of the model, 0 to 1


def draw_layout(
    title: str,
    coordinates: Sequence[MeshCoordinate],
    stages: Sequence[StageCost],
    timelines: Sequence[PipelineTimeline],
    out: Path,
) -> list[Path]:
    """Write `out`.png and `out`.svg: ranks, stages, and `timelines` if there are any.

    Equal arguments give identical files. Raises DataError for a pipeline rank without a stage, and
    for a timeline whose ranks run other stages; ConfigError without matplotlib, or if a file cannot
    be written.
    """
    figure = new_figure(_WIDTH, 1.0)
    from matplotlib import rc_context

    stages_of = _stages_of_ranks(coordinates, stages, timelines)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "titanlite", "hatch.linewidth": 0.7}):
        colours = _stage_colours(stages)
        sheet = figure.add_axes((0, 0, 1, 1))
        sheet.axis("off")
        y = 0.0
        for line in wrap_text(title, 14, _WIDTH):
            draw_text(sheet, 0, y - 0.12, line, 14)
            y -= 0.3
        ranks_box = _draw_ranks(sheet, y - 0.1, coordinates, stages_of, colours)
        y = _draw_stages(sheet, ranks_box, stages, colours)
        if timelines:
            y = draw_gantt_legend(sheet, y - 0.35, _WIDTH, timelines, stages_of)
        for timeline in timelines:
            y = draw_gantt(sheet, y - 0.2, _WIDTH, timeline, stages_of, colours)
        figure.set_size_inches(_WIDTH + 2 * _MARGIN, 2 * _MARGIN - y)  # the height is known now
        sheet.set(xlim=(-_MARGIN, _WIDTH + _MARGIN), ylim=(y - _MARGIN, _MARGIN))
        png, svg = (out.parent / f"{out.name}.{kind}" for kind in ("png", "svg"))
        save_figure(figure, png)
        save_figure(figure, svg, metadata={"Date": None})
    return [png, svg]


def _stages_of_ranks(
    coordinates: Sequence[MeshCoordinate],
    stages: Sequence[StageCost],
    timelines: Sequence[PipelineTimeline],
) -> list[list[int]]:
    """Stages of each pipeline rank, in order; raises DataError if `timelines` run other ones."""
    ranks = range(1 + max(coordinate.pipeline for coordinate in coordinates))
    stages_of = [sorted(s.number for s in stages if s.pipeline == rank) for rank in ranks]
    if not all(stages_of):
        raise DataError(f"Pipeline rank {stages_of.index([])} has no stage.")
    for timeline in timelines:
        run = [sorted({timed.action.stage for timed in actions}) for actions in timeline.ranks]
        if run != stages_of:
            raise DataError(
                f'Timeline "{timeline.name}": pipeline ranks run stages {run}, but have stages'
                f" {stages_of}.",
                fix="Draw it with the settings of the run that it was recorded from.",
            )
    return stages_of


def _stage_colours(stages: Sequence[StageCost]) -> dict[int, str]:
    """Viridis from dark to light, so that the order is visible with colour blindness too."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    numbers = sorted(stage.number for stage in stages)
    positions = np.linspace(0.12, 1.0, len(numbers)) if len(numbers) > 1 else [0.45]
    pale = 0.44 + 0.56 * colormaps["viridis"](positions)[:, :3]  # dark text is legible on all
    return {number: to_hex(colour) for number, colour in zip(numbers, pale, strict=True)}


class _Level(NamedTuple):
    """One mesh dimension inside a panel: a grid of equal blocks. Lengths are in cells."""

    degree: str
    size: int  # number of blocks
    columns: int
    gap: float  # between blocks
    block: tuple[float, float]  # (width, height) of one block, the next smaller dimension

    def offset(self, index: int) -> tuple[float, float]:
        """Distance of block `index` from the left and from the top."""
        row, column = divmod(index, self.columns)
        return column * (self.block[0] + self.gap), row * (self.block[1] + self.gap)

    @property
    def extent(self) -> tuple[float, float]:
        """(width, height) of all blocks."""
        right, bottom = self.offset(self.columns - 1)[0], self.offset(self.size - 1)[1]
        return right + self.block[0], bottom + self.block[1]


def _build_levels(
    degrees: dict[str, int], shard_columns: int, replicate_columns: int
) -> list[_Level]:
    """Levels from the innermost dimension (tensor) to the outermost, with growing gaps."""
    tensor = _Level("tensor", degrees["tensor"], degrees["tensor"], 0.04, (1.0, 1.0))
    context = _Level("context", degrees["context"], degrees["context"], 0.35, tensor.extent)
    shard_gap = 0.7 if shard_columns > 1 and degrees["context"] > 1 else 0.35
    shard = _Level("shard", degrees["shard"], shard_columns, shard_gap, context.extent)
    replicate = _Level("replicate", degrees["replicate"], replicate_columns, 1.0, shard.extent)
    return [tensor, context, shard, replicate]


class _Grid(NamedTuple):
    """Arrangement of the panels, one per pipeline rank."""

    levels: list[_Level]
    columns: int
    cell: float  # inches
    panel: tuple[float, float]  # (width, height) inside the padding, inches
    heading_lines: int


def _arrange(degrees: dict[str, int], headings: list[list[str]], max_height: float = 6.5) -> _Grid:
    """The arrangement that fits the page and has the highest `_preference`."""
    parts = len(headings[0])
    columns = (_column_counts(degrees[name]) for name in ("shard", "replicate", "pipeline"))
    candidates = []
    for shard, replicate, pipeline, lines in product(*columns, {min(1, parts), parts}):
        levels = _build_levels(degrees, shard, replicate)
        width, height = levels[-1].extent
        min_width = max(_heading_width(heading, lines) for heading in headings)
        rows = math.ceil(degrees["pipeline"] / pipeline)
        free_width = (_WIDTH + _SPACING) / pipeline - _SPACING - 2 * _PADDING
        free_height = (max_height + _SPACING) / rows - _SPACING - 2 * _PADDING
        cell = min(_MAX_CELL, free_width / width, (free_height - _HEADING_LINE * lines) / height)
        if cell > min(0.02, 0.9 * _WIDTH / width) and free_width >= min_width:
            panel = max(cell * width, min_width), cell * height + _HEADING_LINE * lines
            candidates.append(_Grid(levels, pipeline, cell, panel, lines))
    if not candidates:  # a very long pipeline needs a longer page
        return _arrange(degrees, headings, 2 * max_height)
    return max(candidates, key=lambda grid: _preference(grid, degrees))


def _preference(grid: _Grid, degrees: dict[str, int]) -> tuple:
    """Sort key of an arrangement, the most important criterion first."""
    shard, replicate = grid.levels[2:]
    columns = shard.columns, replicate.columns, grid.columns
    sizes = shard.size, replicate.size, degrees["pipeline"]
    full_rows = not any(size % n for size, n in zip(sizes, columns, strict=True))
    return (
        int(grid.cell * (1 if full_rows else 0.75) / 0.02),  # large cells
        full_rows,
        -shard.columns if shard.block[0] > 1 else shard.columns,  # wide blocks below each other
        -replicate.columns if replicate.block[0] > 1 else replicate.columns,
        grid.panel[0] < grid.cell * replicate.extent[0] + 0.01,  # no blank space beside the cells
        grid.columns,  # panels beside each other
        -grid.heading_lines,
    )


def _column_counts(count: int) -> list[int]:
    """Numbers of columns worth trying for `count` blocks: the smallest for each number of rows."""
    return sorted({math.ceil(count / rows) for rows in range(1, count + 1)})


def _heading_width(parts: list[str], lines: int) -> float:
    widths = [text_width(part, 8.5) for part in parts]
    return max(widths, default=0.0) if lines != 1 else sum(widths) + 0.15 * (len(widths) - 1)


class _Panel(NamedTuple):
    """The ranks of one pipeline rank."""

    coordinates: list[MeshCoordinate]
    heading: list[str]  # parts, on one line or one line each
    colours: list[str]  # of its stages


def _draw_ranks(
    sheet,
    top: float,
    coordinates: Sequence[MeshCoordinate],
    stages_of: Sequence[Sequence[int]],
    colours: dict[int, str],
) -> Box:
    """Draw one panel per pipeline rank, below a legend of mesh dimensions; return their box."""
    shown = _select_ranks(coordinates)
    by_panel = [[c for c in shown if c.pipeline == rank] for rank in range(len(stages_of))]
    grid, headings, font_size = _arrange_with_headings(by_panel, stages_of)
    top = _draw_dimension_legend(sheet, top, _degrees(coordinates), grid)
    if len(shown) < len(coordinates):
        count = f"{len(shown):,} of {len(coordinates):,} ranks"
        text = f"Shown: {count}; other data-parallel ranks are alike."
        draw_text(sheet, 0, top - 0.1, text, 8.5, FAINT)
        top -= 0.2
    top -= 0.1
    width, height = grid.panel[0] + 2 * _PADDING, grid.panel[1] + 2 * _PADDING
    for number, ranks in enumerate(by_panel):
        row, column = divmod(number, grid.columns)
        left, panel_top = column * (width + _SPACING), top - row * (height + _SPACING)
        background = Box(left, panel_top - height, width, height, 0.06, 0.06)
        fill_boxes(sheet, [background], _PANEL_COLOUR)
        panel = _Panel(ranks, headings[number], [colours[stage] for stage in stages_of[number]])
        _draw_panel(sheet, left + _PADDING, panel_top - _PADDING, panel, grid, font_size)
    rows, columns = math.ceil(len(by_panel) / grid.columns), min(len(by_panel), grid.columns)
    total_width = columns * (width + _SPACING) - _SPACING
    total_height = rows * (height + _SPACING) - _SPACING
    return Box(0, top - total_height, total_width, total_height)


def _draw_panel(
    sheet, left: float, top: float, panel: _Panel, grid: _Grid, font_size: float
) -> None:
    """Draw the heading and the cells of a panel; with rank numbers unless `font_size` is 0."""
    x, y = left, top
    for number, part in enumerate(panel.heading):
        draw_text(sheet, x, y - 0.06, part, 8.5, FAINT if number else INK)
        if grid.heading_lines == 1:
            x += text_width(part, 8.5) + 0.15
        else:
            y -= _HEADING_LINE
    cells = []
    for coordinate in panel.coordinates:
        offsets = [level.offset(getattr(coordinate, level.degree)) for level in grid.levels]
        right, down = (grid.cell * sum(steps) for steps in zip(*offsets, strict=True))
        x, y = left + right, top - _HEADING_LINE * grid.heading_lines - down - grid.cell
        cells.append((x, y, panel.colours))
        if font_size:
            centre = x + grid.cell / 2, y + grid.cell / 2
            draw_text(sheet, *centre, str(coordinate.rank), font_size, ha="center")
    fill_cells(sheet, cells, grid.cell)


def _arrange_with_headings(
    panels: list[list[MeshCoordinate]], stages_of: Sequence[Sequence[int]]
) -> tuple[_Grid, list[list[str]], float]:
    """(arrangement, heading of each panel, font size of rank numbers).

    If rank numbers would be too small, the size is 0, and headings give the first and last rank.
    """
    degrees = _degrees([coordinate for panel in panels for coordinate in panel])
    longest = str(max(coordinate.rank for panel in panels for coordinate in panel))
    headings: list[list[str]] = [[] for _ in panels]
    if len(panels) > 1:
        for number, (heading, stages) in enumerate(zip(headings, stages_of, strict=True)):
            listed = [*stages[:3], f"… {stages[-1]}"] if len(stages) > 8 else stages
            noun = "stage" if len(stages) == 1 else "stages"
            heading += [f"pipeline {number}", f"{noun} {', '.join(map(str, listed))}"]
    grid = _arrange(degrees, headings)
    font_size = fit_font_size(longest, 0.86 * grid.cell, grid.cell, 9, 4.5)
    if not font_size:
        for heading, panel in zip(headings, panels, strict=True):
            heading.append(f"ranks {panel[0].rank} … {panel[-1].rank}")
        grid = _arrange(degrees, headings)
    return grid, headings, font_size


def _degrees(coordinates: Sequence[MeshCoordinate]) -> dict[str, int]:
    return {name: 1 + max(getattr(c, name) for c in coordinates) for name in _DEGREES}


def _select_ranks(coordinates: Sequence[MeshCoordinate]) -> list[MeshCoordinate]:
    """All ranks, or those of as many data-parallel ranks as one plot can show."""
    degrees = _degrees(coordinates)
    per_data_rank = len(coordinates) // (degrees["replicate"] * degrees["shard"])
    in_order = sorted(
        coordinates, key=lambda c: (c.replicate, c.shard, c.pipeline, c.context, c.tensor)
    )
    return in_order[: max(1, _MAX_RANKS // per_data_rank) * per_data_rank]


def _draw_dimension_legend(sheet, top: float, degrees: dict[str, int], grid: _Grid) -> float:
    """Draw how neighbours in each dimension of more than one rank are placed; return the bottom."""
    items = []
    if degrees["pipeline"] > 1:
        panels = [(Box(x, 0, 0.2, 0.2, 0.03, 0.03), GRID) for x in (0, 0.24)]
        items.append((f"pipeline {degrees['pipeline']}", panels))
    for level in reversed(grid.levels):
        if degrees[level.degree] > 1:
            columns = range(1 + (level.columns > 1))
            rows = range(1 + (level.columns < degrees[level.degree]))
            step = 0.12 * (1 + level.gap)
            cells = [
                (Box(step * column, step * row, 0.12, 0.12, 0.02, 0.02), FAINT)
                for column, row in product(columns, rows)
            ]
            items.append((f"{level.degree} {degrees[level.degree]}", cells))
    return draw_legend(sheet, top, _WIDTH, items) if items else top


_SWATCH, _BAR, _COLUMN_GAP = 0.4, 1.12, 0.3  # inches: stage number, cost bar, between columns


def _draw_stages(
    sheet, ranks_box: Box, stages: Sequence[StageCost], colours: dict[int, str]
) -> float:
    """List the modules and the cost of each stage; return the lower end of the list and the ranks.

    The list is beside the ranks if it fits there, else below them.
    """
    widest = max(text_width(stage.modules, 8.5) for stage in stages)
    entry = _SWATCH + widest + _BAR + _COLUMN_GAP
    left, top = ranks_box.width + 0.4, ranks_box.y + ranks_box.height
    free_width = _WIDTH - left
    columns = math.ceil(len(stages) / 8)
    if (free_width + _COLUMN_GAP) / columns < entry:
        left, top, free_width = 0.0, ranks_box.y - 0.3, _WIDTH
        columns = min(columns, max(3, int((_WIDTH + _COLUMN_GAP) / entry)))
    column_width = (free_width + _COLUMN_GAP) / columns
    list_width = min(widest, column_width - _SWATCH - _BAR - _COLUMN_GAP)
    column_width = _SWATCH + list_width + _BAR + _COLUMN_GAP
    rows = math.ceil(len(stages) / columns)
    most_expensive = max(stage.fraction for stage in stages) or 1.0
    lowest, y = ranks_box.y, top
    for position, stage in enumerate(sorted(stages, key=lambda stage: stage.number)):
        column, row = divmod(position, rows)
        y = y - 0.1 if row else top
        bar = 0.44 * stage.fraction / most_expensive
        colour = colours[stage.number]
        y = _draw_stage(sheet, (left + column * column_width, y), stage, colour, list_width, bar)
        lowest = min(lowest, y)
    return lowest


def _draw_stage(
    sheet, corner: tuple[float, float], stage: StageCost, colour: str, list_width: float, bar: float
) -> float:
    """Draw a stage from its top left corner; return the bottom.

    `list_width` is the width of the list of modules, `bar` that of the cost bar.
    """
    x, y = corner
    fill_boxes(sheet, [Box(x, y - 0.17, 0.3, 0.17, 0.03, 0.03)], colour)
    draw_text(sheet, x + 0.15, y - 0.085, str(stage.number), 8, ha="center")
    fill_boxes(sheet, [Box(x + _SWATCH + list_width + 0.12, y - 0.14, bar, 0.11)], colour)
    percent, right = f"{100 * stage.fraction:.1f} %", x + _SWATCH + list_width + _BAR
    draw_text(sheet, right, y - 0.085, percent, 8.5, FAINT, ha="right")
    for line in wrap_text(stage.modules, 8.5, list_width):
        draw_text(sheet, x + _SWATCH, y - 0.085, line, 8.5)
        y -= 0.16
    return y
