"""Measured figures and their Markdown tables."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class NotMeasured(Exception):
    """A figure cannot be measured on this machine; the message is the reason."""


@dataclass(frozen=True)
class Row:
    """One figure of a table, measured once per round."""

    what: str
    unit: str
    each: tuple[float, ...] = ()
    target: str = ""
    missed: str = ""  # why there is no figure

    @property
    def median(self) -> float | None:
        return statistics.median(self.each) if self.each else None


def row(what: str, unit: str, each: Iterable[float], target: str = "") -> Row:
    """A row with one figure per round, in order."""
    return Row(what, unit, tuple(each), target)


def number(value: float | None) -> str:
    """Three significant digits, or all digits before the point; "not measured" for None."""
    if value is None:
        return "not measured"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: per row the median, the range over rounds and the target."""
    lines = []
    for row in rows:
        rounds = f"{number(min(row.each))} to {number(max(row.each))}" if row.each else row.missed
        lines.append((row.what, number(row.median), rounds, row.unit, row.target))
    return grid(("measurement", "median", "rounds", "unit", "target"), lines, "lrrll")


def grid(header: Sequence[str], lines: Iterable[Sequence[str]], alignments: str) -> str:
    """A Markdown table; `alignments` has "l" or "r" for each column."""
    rule = ["---:" if alignment == "r" else "---" for alignment in alignments]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines)) + "\n"


def list_entries(entries: Mapping[str, str]) -> str:
    """A Markdown list of names and values: the command, the machine, the versions."""
    return "".join(f"- {name}: {value}\n" for name, value in entries.items()) + "\n"


def write_table(
    out: Path, entries: Mapping[str, str], markdown: str, rows: Sequence[object]
) -> None:
    """Write entries and table to `out`, and the rounds of all rows to a .json file beside it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(list_entries(entries) + markdown, encoding="utf-8")
    record = {**entries, "rows": [dataclasses.asdict(row) for row in rows]}
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
