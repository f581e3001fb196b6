"""Gantt chart of a pipeline: when each rank computes and when it is idle, one row per rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titanlite.errors import DataError
from titanlite.parallelize.schedule import ActionKind, format_action
from titanlite_lab.figure import (
    FAINT,
    INK,
    Box,
    draw_legend,
    draw_text,
    fill_boxes,
    fill_cells,
    fit_font_size,
    wrap_text,
)
from titanlite_planner.time.simulation import TimedAction

_KINDS: dict[ActionKind, tuple[str, str]] = {  # (colour, label); distinct for colour-blind readers
    "forward": ("#2f6fb2", "forward"),
    "backward": ("#d97b29", "backward"),
    "input": ("#a8326b", "backward, of inputs"),
    "weight": ("#6fbf73", "backward, of weights"),
}
_IDLE = {"facecolor": "#f4f5f7", "edgecolor": "#dde1e6", "hatch": "/////"}
_LEFT = 0.7  # inches for the rank numbers, left of the time axis
_ROW = 0.36  # maximum inches per rank


@dataclass(frozen=True)
class PipelineTimeline:
    """Actions of each pipeline rank in one step; raises DataError if actions of a rank overlap."""

    name: str  # such as "computed" or "measured, iteration_10"
    ranks: Sequence[Sequence[TimedAction]]
    unit: str  # such as "forwards of an average stage" or "s"

    def __post_init__(self) -> None:
        if not any(self.ranks) or not self.span > 0:
            raise DataError(f'Timeline "{self.name}": no action takes any time.')
        # rounding of float64 times, which are coarse in seconds since 1970
        tolerance = 1e-6 * self.span + 8 * math.ulp(self.begin)
        for rank, actions in enumerate(self.ranks):
            busy_until = -math.inf
            for timed in sorted(actions, key=lambda timed: (timed.start, timed.end)):
                if not busy_until - tolerance <= timed.start <= timed.end:
                    raise DataError(
                        f'Timeline "{self.name}": pipeline rank {rank} is busy until'
                        f" {busy_until:g}, but runs {format_action(timed.action)} from"
                        f" {timed.start:g} to {timed.end:g}.",
                        fix="Actions of a rank must not overlap: check the source of these times.",
                    )
                busy_until = timed.end

    @property
    def begin(self) -> float:
        """Start of the first action."""
        return min(timed.start for actions in self.ranks for timed in actions)

    @property
    def span(self) -> float:
        """Time from the first start to the last end, over all ranks."""
        return max(timed.end for actions in self.ranks for timed in actions) - self.begin

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time, over the span, in which they are idle."""
        busy = sum(timed.end - timed.start for actions in self.ranks for timed in actions)
        return 1 - busy / (len(self.ranks) * self.span)


def draw_gantt_legend(
    sheet,
    top: float,
    width: float,
    timelines: Sequence[PipelineTimeline],
    stages_of: Sequence[Sequence[int]],
) -> float:
    """Draw what the colours mean; return the bottom. `stages_of` as in `draw_gantt`."""
    all_actions = [actions for timeline in timelines for actions in timeline.ranks]
    drawn = {timed.action.kind for actions in all_actions for timed in actions}
    shades = max(map(len, stages_of))
    step = 0.3 if shades == 1 else 0.18
    items = [
        (label, [(Box(step * n, 0, step, 0.16), _shade(kind, n, shades)) for n in range(shades)])
        for kind, (_, label) in _KINDS.items()
        if kind in drawn
    ]
    y = draw_legend(sheet, top, width, [*items, ("idle", [(Box(0, 0, 0.3, 0.16), _IDLE)])])
    if shades > 1:
        text = "From light to dark: the first to the last stage of a rank."
        draw_text(sheet, 0, y - 0.1, text, 8.5, FAINT)
        y -= 0.2
    return y


def draw_gantt(
    sheet,
    top: float,
    width: float,
    timeline: PipelineTimeline,
    stages_of: Sequence[Sequence[int]],
    colours: dict[int, str],
) -> float:
    """Draw `timeline` under its name and bubble; return the bottom.

    `stages_of` has the stages of each pipeline rank in order, `colours` the colour of each stage.
    """
    for line in wrap_text(f"{timeline.name}: {100 * timeline.bubble:.1f} % idle", 11, width):
        draw_text(sheet, 0, top - 0.12, line, 11)
        top -= 0.24
    row = min(_ROW, max(0.07, 5.0 / len(stages_of)))
    height = 0.88 * row
    bottoms = [top - 0.08 - row * (rank + 1) for rank in range(len(stages_of))]
    inches_per_unit = (width - _LEFT) / timeline.span
    idle = [Box(_LEFT, bottom, width - _LEFT, height) for bottom in bottoms]
    fill_boxes(sheet, idle, None, **_IDLE)
    _draw_actions(sheet, timeline, stages_of, bottoms, height, inches_per_unit)
    left = _LEFT - 0.1 - height
    cells = [
        (left, bottom, [colours[stage] for stage in stages])
        for bottom, stages in zip(bottoms, stages_of, strict=True)
    ]
    fill_cells(sheet, cells, height)
    for rank in range(0, len(stages_of), math.ceil(0.12 / row)):  # labels must not overlap
        draw_text(sheet, left - 0.06, bottoms[rank] + height / 2, str(rank), 8, ha="right")
    _draw_time_axis(sheet, bottoms[-1], timeline, inches_per_unit, width)
    return bottoms[-1] - 0.45


def _draw_actions(
    sheet,
    timeline: PipelineTimeline,
    stages_of: Sequence[Sequence[int]],
    bottoms: Sequence[float],
    height: float,
    inches_per_unit: float,
) -> None:
    """Draw a box for each action that takes time, with its micro-batch where that fits."""
    # (kind, index of the stage on its rank, stages of the rank) -> boxes with their micro-batches
    boxes: dict[tuple[ActionKind, int, int], list[tuple[Box, int]]] = defaultdict(list)
    begin = timeline.begin
    for actions, stages, bottom in zip(timeline.ranks, stages_of, bottoms, strict=True):
        for action, start, end in actions:
            width = (end - start) * inches_per_unit
            gap = min(0.012, 0.15 * width)  # between neighbouring boxes
            radius = 0.03 if width > 0.1 else 0.0
            x = _LEFT + (start - begin) * inches_per_unit
            if width:
                box = Box(x, bottom, width - gap, height, radius, radius)
                shade = action.kind, stages.index(action.stage), len(stages)
                boxes[shade].append((box, action.microbatch))
    numbered = [pair for pairs in boxes.values() for pair in pairs]
    longest = str(max(number for _, number in numbered))
    narrow = float(np.quantile([box.width for box, _ in numbered], 0.1))
    size = fit_font_size(longest, 0.9 * narrow, height, 8.5, 5.5) or 5.5
    for shade, pairs in boxes.items():
        colour = _shade(*shade)
        fill_boxes(sheet, [box for box, _ in pairs], colour)
        for box, number in pairs:
            if fit_font_size(longest, 0.9 * box.width, height, size, size):
                x, y = box.x + box.width / 2, box.y + box.height / 2
                draw_text(sheet, x, y, str(number), size, _text_colour_on(colour), ha="center")


def _draw_time_axis(
    sheet, bottom: float, timeline: PipelineTimeline, inches_per_unit: float, width: float
) -> None:
    from matplotlib.ticker import MaxNLocator

    for time in MaxNLocator(10).tick_values(0, timeline.span):
        x = _LEFT + time * inches_per_unit
        if x < width + 0.01:
            fill_boxes(sheet, [Box(x, bottom - 0.04, 0.007, 0.04)], FAINT)
            draw_text(sheet, x, bottom - 0.12, f"{time:g}", 8, FAINT, ha="center")
    draw_text(sheet, 0, bottom - 0.12, "pipeline", 8, FAINT)
    middle = (_LEFT + width) / 2
    draw_text(sheet, middle, bottom - 0.3, f"time, {timeline.unit}", 8.5, FAINT, ha="center")


def _shade(kind: ActionKind, number: int, count: int) -> str:
    """Colour of an action on stage `number` of a rank's `count`; the last stage is the darkest."""
    from matplotlib.colors import to_hex, to_rgb

    white = 0.45 * (1 - number / (count - 1)) if count > 1 else 0.0
    red, green, blue = (white + (1 - white) * part for part in to_rgb(_KINDS[kind][0]))
    return to_hex((red, green, blue))


def _text_colour_on(colour: str) -> str:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.53 else "white"
