"""Building blocks of HTML reports; a page loads nothing from the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from typing import Any

from titanlite_lab.report.style import SCRIPT, STYLE


def html_page(title: str, sections: Iterable[str]) -> str:
    """A page of HTML sections, as text."""
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<h1>{escape(title)}</h1><p>Report of {written}. Times are UTC.</p>{''.join(sections)}"
        f"</main><script>{SCRIPT}</script></body></html>\n"
    )


def html_section(title: str, content: str) -> str:
    """A section with a heading; empty without content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def html_table(header: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    """A table whose cells are escaped; empty without rows. `kind` is its CSS class, or ""."""
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    body = [f"<tr>{row}</tr>" for row in cells]
    if not body:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{"".join(body)}</table></div>'


def html_bars(
    rows: Sequence[tuple[str, Sequence[float]]], colours: Sequence[str], names: Sequence[str] = ()
) -> str:
    """Horizontal bars, a row for each label and a bar for each value; the longest is 100%."""
    longest = max((value for _, values in rows for value in values), default=0)
    if not longest:
        return ""
    legend = "".join(
        f'<span style="--c:{colour}">{escape(name)}</span>'
        for name, colour in zip(names, colours, strict=False)
    )
    content = "".join(
        f'<div class="row"><span>{escape(label)}</span><div>{_bars(values, colours, longest)}'
        "</div></div>"
        for label, values in rows
    )
    return f'<div class="legend">{legend}</div><div class="bars">{content}</div>'


def _bars(values: Sequence[float], colours: Sequence[str], longest: float) -> str:
    return "".join(
        f'<i style="width:calc((100% - 5.5rem) * {value / longest:.4f});background:{colour}"></i>'
        f"<b>{value:,}</b>"
        for value, colour in zip(values, colours, strict=False)
    )
