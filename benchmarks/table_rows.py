"""What was measured, and the tables it is shown in."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class Missed(Exception):
    """What cannot be measured here, and why."""


@dataclass(frozen=True)
class Row:
    """One figure: the median of `each`, which holds one for every round."""

    what: str
    unit: str
    each: tuple[float, ...] = ()
    target: str = ""
    missed: str = ""  # why there is none

    @property
    def median(self) -> float | None:
        return statistics.median(self.each) if self.each else None


def row(what: str, unit: str, each: Iterable[float], target: str = "") -> Row:
    """A row of the rounds' figures, in their order."""
    return Row(what, unit, tuple(each), target)


def number(value: float | None) -> str:
    """Three digits, or all before the point; a figure that is not there is never made up."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a row: the median, the rounds' extremes, and what is wanted."""
    lines = []
    for each in rows:
        ends = f"{number(min(each.each))} to {number(max(each.each))}" if each.each else each.missed
        lines.append((each.what, number(each.median), ends, each.unit, each.target))
    return grid(("what", "median", "rounds", "unit", "target"), lines, "lrrll")


def grid(heads: Sequence[str], lines: Iterable[Sequence[str]], sides: str) -> str:
    """A Markdown table; `sides` says l or r for each column."""
    marks = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, marks, *lines)) + "\n"


def facts(about: Mapping[str, str]) -> str:
    """Where and how it was measured, above a table."""
    return "".join(f"- {name}: {value}\n" for name, value in about.items()) + "\n"


def write(out: Path, about: Mapping[str, str], markdown: str, rows: Sequence[object]) -> None:
    """The table as Markdown, and every round of every row as JSON beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(facts(about) + markdown, encoding="utf-8")
    record = {**about, "rows": [dataclasses.asdict(each) for each in rows]}
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
