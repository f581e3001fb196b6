"""When each pipeline rank works and when it idles: a row a rank, a box an action."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from titanlite.errors import DataError
from titanlite.observe.figure import FAINT, INK, Box, draw_key, fill, fill_cells, fitting, write

_IDLE = {"facecolor": "#f4f5f7", "edgecolor": "#dde1e6", "hatch": "/////"}
_KINDS = {
    "forward": ("#2f6fb2", "forward"),
    "backward": ("#d97b29", "backward"),
    "input": ("#c2456b", "backward, of inputs"),
    "weight": ("#2a9d8f", "backward, of weights"),
}
_LEFT = 0.7  # inches for the names of the rows


@dataclass(frozen=True)
class Action:
    """One micro-batch through one stage in one direction, and when."""

    kind: Literal["forward", "backward", "input", "weight"]  # the last two: a backward's halves
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What the pipeline ranks do in one step; raises DataError where one does two things at once."""

    name: str  # such as "computed" or "measured, iteration_10"
    ranks: list[list[Action]]
    unit: str  # such as "forwards of an average stage" or "s"

    def __post_init__(self) -> None:
        if not any(self.ranks) or not self.span > 0:
            raise DataError(f'Timeline "{self.name}": nothing in it takes any time.')
        rounding = 1e-6 * self.span  # what a clock may be wrong by
        for rank, actions in enumerate(self.ranks):
            in_order = sorted(actions, key=lambda action: (action.start, action.end))
            for one, other in pairwise(in_order):
                if one.end > other.start + rounding:
                    raise DataError(
                        f'Timeline "{self.name}": on pipeline rank {rank}, {one} and {other} overlap.'
                    )

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


def draw_gantt_key(sheet, top: float, width: float, timelines, held) -> float:
    """What the colours of the boxes mean; returns its bottom."""
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


def draw_gantt(sheet, top: float, width: float, timeline: Timeline, held, colours) -> float:
    """`timeline` under its name and idle share, beside its ranks; returns its bottom.

    `held` has the stages of each pipeline rank in order, and `colours` the colour of each stage.
    """
    write(sheet, 0, top - 0.12, f"{timeline.name}: {100 * timeline.bubble:.1f} % idle", 11)
    ranks = len(timeline.ranks)
    row = min(0.36, max(0.07, 5.0 / ranks))
    high = 0.88 * row
    floors = [top - 0.32 - row * (rank + 1) for rank in range(ranks)]
    inch = (width - _LEFT) / timeline.span  # of paper, for a unit of time
    fill(sheet, [Box(_LEFT, y, width - _LEFT, high) for y in floors], None, **_IDLE)
    _draw_actions(sheet, timeline, held, floors, high, inch)
    side = min(high, 0.3)
    cells = [(_LEFT - 0.1 - side, y + (high - side) / 2) for y in floors]
    fill_cells(sheet, [(x, y, [colours[s] for s in held[n]]) for n, (x, y) in enumerate(cells)], side)
    every = int(np.ceil(0.12 / row))  # so that the names of rows stay apart
    for rank in range(0, ranks, every):
        write(sheet, _LEFT - 0.16 - side, floors[rank] + high / 2, str(rank), 8, ha="right")
    _draw_time(sheet, floors[-1], timeline, inch, width)
    return floors[-1] - 0.45


def _draw_actions(sheet, timeline: Timeline, held, floors, high: float, inch: float) -> None:
    boxes: dict[tuple[str, int, int], list[tuple[Box, int]]] = defaultdict(list)
    for mine, actions, floor in zip(held, timeline.ranks, floors, strict=True):
        for action in actions:
            wide = (action.end - action.start) * inch
            white = min(0.012, 0.15 * wide)  # a slit between neighbours
            bend = 0.03 if wide > 0.1 else 0.0
            x = _LEFT + (action.start - timeline.begin) * inch
            key = action.kind, mine.index(action.stage), len(mine)
            if wide:
                box = Box(x, floor, wide - white, high, bend, bend)
                boxes[key].append((box, action.microbatch))
    pairs = [pair for some in boxes.values() for pair in some]
    widest = str(max(number for _, number in pairs))
    narrow = float(np.quantile([box.width for box, _ in pairs], 0.1))
    size = fitting(widest, 0.9 * narrow, high, 8.5, 5.5) or 5.5
    for key, some in boxes.items():
        colour = _shade(*key)
        fill(sheet, [box for box, _ in some], colour)
        for box, number in some:
            if fitting(widest, 0.9 * box.width, high, size, size):
                middle = box.x + box.width / 2, box.y + box.height / 2
                write(sheet, *middle, str(number), size, _readable_on(colour), ha="center")


def _draw_time(sheet, floor: float, timeline: Timeline, inch: float, width: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for at in MaxNLocator(10).tick_values(0, timeline.span):
        if 0 <= at <= timeline.span * 1.0001:
            sheet.plot([_LEFT + at * inch] * 2, [floor, floor - 0.04], color=FAINT, linewidth=0.6)
            write(sheet, _LEFT + at * inch, floor - 0.12, f"{at:g}", 8, FAINT, ha="center")
    write(sheet, 0, floor - 0.12, "pipeline", 8, FAINT)
    write(sheet, (_LEFT + width) / 2, floor - 0.3, f"time, {timeline.unit}", 8.5, FAINT, ha="center")


def _shade(kind: str, number: int, of: int) -> str:
    """The colour of a kind, lighter for all but the last of a rank's stages."""
    from matplotlib.colors import to_hex, to_rgb

    light = 0.5 * (1 - number / (of - 1)) if of > 1 else 0.0
    return to_hex([light + (1 - light) * part for part in to_rgb(_KINDS[kind][0])])


def _readable_on(colour: str) -> str:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"
