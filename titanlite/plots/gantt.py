"""When each pipeline rank works and when it idles: a row a rank, a box an action."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from titanlite.errors import DataError
from titanlite.plots.figure import (
    FAINT,
    INK,
    Box,
    draw_key,
    fill,
    fill_cells,
    fitting,
    wrapped,
    write,
)

_KINDS = {  # colours that stay apart for colour-blind eyes too, in both shades
    "forward": ("#2f6fb2", "forward"),
    "backward": ("#d97b29", "backward"),
    "input": ("#a8326b", "backward, of inputs"),
    "weight": ("#6fbf73", "backward, of weights"),
}
_IDLE = {"facecolor": "#f4f5f7", "edgecolor": "#dde1e6", "hatch": "/////"}
_LEFT = 0.7  # inches for the ranks, before time begins
_ROW = 0.36  # inches of a rank where there is room


@dataclass(frozen=True)
class DrawnAction:
    """One micro-batch through one stage in one direction, and when."""

    kind: Literal["forward", "backward", "input", "weight"]  # the last two: a backward's halves
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class DrawnTimeline:
    """What the pipeline ranks do in one step; raises DataError where one does two at once."""

    name: str  # such as "computed" or "measured, iteration_10"
    ranks: list[list[DrawnAction]]
    unit: str  # such as "forwards of an average stage" or "s"

    def __post_init__(self) -> None:
        if not any(self.ranks) or not self.span > 0:
            raise DataError(f'Timeline "{self.name}": nothing in it takes any time.')
        rounding = 1e-6 * self.span + 8 * math.ulp(self.begin)  # seconds since 1970 are coarse
        for rank, actions in enumerate(self.ranks):
            free = -math.inf
            for action in sorted(actions, key=lambda action: (action.start, action.end)):
                if not free - rounding <= action.start <= action.end:
                    raise DataError(
                        f'Timeline "{self.name}": pipeline rank {rank} is busy until {free:g}, but'
                        f" does {action}.",
                        fix="A rank does one thing at a time: check where these times come from.",
                    )
                free = action.end

    @property
    def begin(self) -> float:
        return min(action.start for actions in self.ranks for action in actions)

    @property
    def span(self) -> float:
        """From the first start to the last end, over all ranks."""
        return max(action.end for actions in self.ranks for action in actions) - self.begin

    @property
    def bubble(self) -> float:
        """Share of the ranks' time, over the span, in which nothing runs."""
        busy = sum(action.end - action.start for actions in self.ranks for action in actions)
        return 1 - busy / (len(self.ranks) * self.span)


def draw_gantt_key(
    sheet,
    top: float,
    width: float,
    timelines: Sequence[DrawnTimeline],
    held: Sequence[Sequence[int]],
) -> float:
    """What the colours of the boxes mean; returns the bottom."""
    there = {action.kind for line in timelines for actions in line.ranks for action in actions}
    most = max(map(len, held))
    step = 0.3 if most == 1 else 0.18
    signs = [
        (words, [(Box(step * n, 0, step, 0.16), _shade(kind, n, most)) for n in range(most)])
        for kind, (_, words) in _KINDS.items()
        if kind in there
    ]
    y = draw_key(sheet, top, width, [*signs, ("idle", [(Box(0, 0, 0.3, 0.16), _IDLE)])])
    if most > 1:
        words = "From light to dark: the first to the last of a rank's stages."
        write(sheet, 0, y - 0.1, words, 8.5, FAINT)
        y -= 0.2
    return y


def draw_gantt(
    sheet,
    top: float,
    width: float,
    timeline: DrawnTimeline,
    held: Sequence[Sequence[int]],
    colours: dict[int, str],
) -> float:
    """`timeline` under its name and idle share; returns the bottom.

    `held` has the stages of each pipeline rank in order, `colours` the colour of each stage.
    """
    for line in wrapped(f"{timeline.name}: {100 * timeline.bubble:.1f} % idle", 11, width):
        write(sheet, 0, top - 0.12, line, 11)
        top -= 0.24
    row = min(_ROW, max(0.07, 5.0 / len(held)))
    high = 0.88 * row
    floors = [top - 0.08 - row * (rank + 1) for rank in range(len(held))]
    inch = (width - _LEFT) / timeline.span  # of paper, for one unit of time
    fill(sheet, [Box(_LEFT, floor, width - _LEFT, high) for floor in floors], None, **_IDLE)
    _draw_actions(sheet, timeline, held, floors, high, inch)
    left = _LEFT - 0.1 - high
    cells = zip(floors, held, strict=True)
    fill_cells(sheet, [(left, y, [colours[stage] for stage in mine]) for y, mine in cells], high)
    for rank in range(0, len(held), math.ceil(0.12 / row)):  # the names of rows stay apart
        write(sheet, left - 0.06, floors[rank] + high / 2, str(rank), 8, ha="right")
    _draw_time(sheet, floors[-1], timeline, inch, width)
    return floors[-1] - 0.45


def _draw_actions(sheet, timeline: DrawnTimeline, held, floors, high: float, inch: float) -> None:
    boxes: dict[tuple[str, int, int], list[tuple[Box, int]]] = defaultdict(list)
    begin = timeline.begin
    for actions, mine, floor in zip(timeline.ranks, held, floors, strict=True):
        for action in actions:
            wide = (action.end - action.start) * inch
            slit = min(0.012, 0.15 * wide)  # between neighbours
            bend = 0.03 if wide > 0.1 else 0.0
            box = Box(_LEFT + (action.start - begin) * inch, floor, wide - slit, high, bend, bend)
            if wide:
                shade = action.kind, mine.index(action.stage), len(mine)
                boxes[shade].append((box, action.microbatch))
    drawn = [pair for pairs in boxes.values() for pair in pairs]
    longest = str(max(number for _, number in drawn))
    narrow = float(np.quantile([box.width for box, _ in drawn], 0.1))
    size = fitting(longest, 0.9 * narrow, high, 8.5, 5.5) or 5.5
    for shade, pairs in boxes.items():
        colour = _shade(*shade)
        fill(sheet, [box for box, _ in pairs], colour)
        for box, number in pairs:
            if fitting(longest, 0.9 * box.width, high, size, size):
                x, y = box.x + box.width / 2, box.y + box.height / 2
                write(sheet, x, y, str(number), size, _legible_on(colour), ha="center")


def _draw_time(sheet, floor: float, timeline: DrawnTimeline, inch: float, width: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for at in MaxNLocator(10).tick_values(0, timeline.span):
        x = _LEFT + at * inch
        if x < width + 0.01:
            fill(sheet, [Box(x, floor - 0.04, 0.007, 0.04)], FAINT)
            write(sheet, x, floor - 0.12, f"{at:g}", 8, FAINT, ha="center")
    write(sheet, 0, floor - 0.12, "pipeline", 8, FAINT)
    middle = (_LEFT + width) / 2
    write(sheet, middle, floor - 0.3, f"time, {timeline.unit}", 8.5, FAINT, ha="center")


def _shade(kind: str, number: int, of: int) -> str:
    """The colour of a kind in a rank's stage `number` of so many: lighter in all but the last."""
    from matplotlib.colors import to_hex, to_rgb

    white = 0.45 * (1 - number / (of - 1)) if of > 1 else 0.0
    return to_hex([white + (1 - white) * part for part in to_rgb(_KINDS[kind][0])])


def _legible_on(colour: str) -> str:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.53 else "white"
