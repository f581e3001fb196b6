"""Measured figures, and the Markdown tables that show them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class NotMeasured(Exception):
    """A figure that cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Row:
    """One figure, measured once per round; its value is the median."""

    what: str
    unit: str
    each: tuple[float, ...] = ()
    target: str = ""
    missed: str = ""  # why there is no figure

    @property
    def median(self) -> float | None:
        return statistics.median(self.each) if self.each else None


def row(what: str, unit: str, each: Iterable[float], target: str = "") -> Row:
    """A row of figures, one per round, in order."""
    return Row(what, unit, tuple(each), target)


def number(value: float | None) -> str:
    """Three significant digits, or all digits before the point; "not measured" for None."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: per row the median, the range over rounds and the target."""
    lines = []
    for each in rows:
        ends = f"{number(min(each.each))} to {number(max(each.each))}" if each.each else each.missed
        lines.append((each.what, number(each.median), ends, each.unit, each.target))
    return grid(("what", "median", "rounds", "unit", "target"), lines, "lrrll")


def grid(heads: Sequence[str], lines: Iterable[Sequence[str]], sides: str) -> str:
    """A Markdown table; `sides` has l or r per column."""
    marks = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, marks, *lines)) + "\n"


def facts(about: Mapping[str, str]) -> str:
    """The list above a table: machine, versions, command."""
    return "".join(f"- {name}: {value}\n" for name, value in about.items()) + "\n"


def write(out: Path, about: Mapping[str, str], markdown: str, rows: Sequence[object]) -> None:
    """Write the table as Markdown, and all rounds of all rows as JSON beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(facts(about) + markdown, encoding="utf-8")
    record = {**about, "rows": [dataclasses.asdict(each) for each in rows]}
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
