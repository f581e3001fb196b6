"""The report of a corpus: what each stage read and wrote, removed and changed, as one HTML page.

All text comes from counts, which contain samples of documents: everything is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from titanlite.errors import DataError
from titanlite.files import write_file_atomically
from titanlite.log import pluralize
from titanlite_lab.report.page import html_bars, html_page, html_section, html_table

IN_COLOUR, OUT_COLOUR, REMOVED_COLOUR = "#b8bec6", "#2f6fb2", "#d1495b"
Stages = Mapping[str, Mapping[str, Any]]  # name -> its counts (see counts.py)


def write_corpus_report(stages: Stages, title: str, out: Path) -> None:
    """Write the report of a corpus; raises DataError if `out` cannot be written.

    stages: in the order in which they ran.
    """
    try:
        write_file_atomically(out, render_corpus_report(stages, title).encode())
    except OSError as error:
        raise DataError(f"{out}: cannot be written ({error.strerror}).") from None


def render_corpus_report(stages: Stages, title: str) -> str:
    """The page as text."""
    return html_page(
        title,
        [
            html_section("Stages", _stage_table(stages) + _token_table(stages)),
            html_section("Removed documents", _removed(stages)),
            html_section("Changed documents", _changed(stages)),
            html_section("Skipped inputs", _skipped(stages)),
            html_section("Clusters of duplicates", _clusters(stages)),
            html_section("Sources", _sources(stages)),
            html_section("Length of documents", _lengths(stages)),
        ],
    )


# --- stages --------------------------------------------------------------------------------------


def _stage_table(stages: Stages) -> str:
    header = ["stage", "documents in", "documents out", "text in", "text out", "tokens out"]
    header += ["CPU time", "speed of a core"]
    return html_table(header, [_stage_row(*stage) for stage in stages.items()], "figures")


def _stage_row(name: str, counts: Mapping[str, Any]) -> list[str]:
    keys = ("documents_in", "documents_out", "bytes_in", "bytes_out", "tokens_out")
    values = {key: counts.get(key) for key in keys}
    seconds, size = counts.get("seconds"), values["bytes_in"] or values["bytes_out"]
    speed = f"{size / seconds / 1e6:.3g} MB/s" if seconds and size else "-"
    return [
        name,
        *(_number(values[key]) for key in keys[:2]),
        *(_size(values[key]) for key in keys[2:4]),
        _number(values["tokens_out"]),
        "-" if seconds is None else f"{seconds:,.3g} s",
        speed,
    ]


def _token_table(stages: Stages) -> str:
    """Tokens per byte of the stage that makes tokens of text, by source."""
    rows = []
    for counts in stages.values():
        tokenised = dict(sorted(counts.get("tokenised", {}).items()))
        if len(tokenised) > 1:
            tokenised["all sources"] = {"tokens": counts["tokens_out"], "bytes": counts["bytes_in"]}
        for name, entry in tokenised.items():
            if (tokens := entry["tokens"]) and (size := entry["bytes"]):
                ratios = (f"{tokens / size:.4f}", f"{size / tokens:.3f}")
                rows.append((name, _size(size), _number(tokens), *ratios))
    header = ["source", "text", "tokens", "tokens per byte", "bytes per token"]
    return html_table(header, rows, "figures")


# --- rules ---------------------------------------------------------------------------------------


def _removed(stages: Stages) -> str:
    """What each rule removed, with samples."""
    parts = []
    for stage, counts in stages.items():
        removed = counts.get("removed", {})
        total = counts.get("documents_in") or 0
        most = max((entry["documents"] for entry in removed.values()), default=0)
        rules = []
        for rule in sorted(removed, key=lambda rule: -removed[rule]["documents"]):
            number, size = removed[rule]["documents"], _size(removed[rule]["bytes"])
            share = f" ({number / total:.2%})" if total else ""
            text = f"{pluralize(number, 'document')}{share}, {size}"
            rules.append(_rule(rule, text, number / most if most else 0, counts))
        if rules:
            parts.append(f"<h3>{escape(stage)}</h3>{''.join(rules)}")
    return "".join(parts)


def _changed(stages: Stages) -> str:
    """What each rule changed: lines removed, addresses replaced; with samples."""
    return "".join(
        _rule(
            rule,
            f"{pluralize(entry['parts'], 'change')} in {pluralize(entry['documents'], 'document')}",
            0,
            counts,
        )
        for counts in stages.values()
        for rule, entry in counts.get("changed", {}).items()
    )


def _skipped(stages: Stages) -> str:
    """Inputs that could not be read, by kind of problem, and files of folders by suffix."""
    return "".join(
        _rule(rule, number, 0, counts)
        for stage, counts in stages.items()
        for rule, number in (
            *((f"{stage}.{kind}", f"{n:,}") for kind, n in counts.get("skipped", {}).items()),
            *(
                (f"{stage}.unread {suffix}", f"{pluralize(n, 'file')} of folders, not read")
                for suffix, n in counts.get("unread", {}).items()
            ),
        )
    )


def _rule(rule: str, text: str, share: float, counts: Mapping[str, Any]) -> str:
    """One line about a rule, with a bar; its samples unfold below."""
    bar = f'<i style="width:{share:.2%};background:{REMOVED_COLOUR}"></i>' if share else ""
    items = "".join(f"<li>{_sample(s)}</li>" for s in counts.get("samples", {}).get(rule, []))
    return (
        f'<details class="rule"><summary><span>{escape(rule)}</span>'
        f" <small>{escape(text)}</small>{bar}</summary>"
        f'<ul class="samples">{items or "<li>no examples</li>"}</ul></details>'
    )


def _sample(sample: Mapping[str, Any]) -> str:
    """A sample; of a near duplicate also the document that was kept."""
    values = [
        f"{name}: {sample[key]}"
        for key, name in (("value", "value"), ("estimate", "estimate"))
        if sample.get(key) not in (None, "")
    ]
    text = _text(sample["origin"], values, sample.get("text", ""))
    if "kept_text" in sample:
        text += _text(f"kept: {sample.get('kept_origin', '')}", [], sample["kept_text"])
    return text


def _text(origin: str, values: Sequence[str], text: str) -> str:
    head = ", ".join([origin, *values])
    return f"<small>{escape(head)}</small>" + (f"<pre>{escape(str(text))}</pre>" if text else "")


# --- histograms ----------------------------------------------------------------------------------


def _clusters(stages: Stages) -> str:
    """Clusters by their number of documents, in ranges that double."""
    parts = []
    for stage, counts in stages.items():
        ranges: dict[int, int] = {}
        for size, number in counts.get("clusters", {}).items():
            power = int(size).bit_length() - 1
            ranges[power] = ranges.get(power, 0) + number
        rows = [(_range(power, "documents"), [ranges[power]]) for power in sorted(ranges)]
        if chart := html_bars(rows, [OUT_COLOUR], ["clusters"]):
            parts.append(f"<h3>{escape(stage)}</h3>{chart}")
    return "".join(parts)


def _sources(stages: Stages) -> str:
    """Text of each source, as it was read and as the last stage of documents left it."""
    first, last = _ends(stages, "sources")
    names = sorted(first)
    rows = []
    bars = []
    for name in names:
        before, after = _side(first[name]), last.get(name, {})
        left = {key: after.get(f"{key}_out", 0) for key in ("documents", "bytes")}
        share = left["bytes"] / before["bytes"] if before["bytes"] else 0.0
        shown = (_number(before["documents"]), _number(left["documents"]))
        sizes = (_size(before["bytes"]), _size(left["bytes"]))
        rows.append((name, *shown, *sizes, f"{share:.1%}"))
        bars.append((name, [round(side["bytes"] / 1e6, 2) for side in (before, left)]))
    header = ["source", "documents read", "left", "text read", "left", "share left"]
    chart = html_bars(bars, [IN_COLOUR, OUT_COLOUR], ["MB read", "MB left"])
    return chart + html_table(header, rows, "figures")


def _side(entry: Mapping[str, int]) -> dict[str, int]:
    """What went into the first stage; a stage that reads files counts only what comes out."""
    keys = ("documents", "bytes")
    return {key: entry.get(f"{key}_in", entry.get(f"{key}_out", 0)) for key in keys}


def _lengths(stages: Stages) -> str:
    """Documents by their bytes of text, as read and as left by the last stage of documents."""
    sides: list[Mapping[str, int]] = [
        counts[key]
        for counts in stages.values()
        for key in ("lengths_in", "lengths_out")
        if key in counts
    ]
    if not sides:
        return ""
    first, last = sides[0], sides[-1]
    powers = sorted({int(power) for side in (first, last) for power in side})
    rows = [
        (_range(power, ""), [first.get(str(power), 0), last.get(str(power), 0)])
        for power in (range(powers[0], powers[-1] + 1) if powers else ())
    ]
    names = ["documents read", "documents left"]
    chart = html_bars(rows, [IN_COLOUR, OUT_COLOUR], names)
    return f"<p>Bytes of text (UTF-8) in a document.</p>{chart}" if chart else ""


def _ends(stages: Stages, key: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A key of the first and of the last stage that counts it."""
    found = [counts[key] for counts in stages.values() if counts.get(key)]
    return (found[0], found[-1]) if found else ({}, {})


def _range(power: int, unit: str) -> str:
    """The numbers from 2^power to 2^(power + 1) - 1."""
    low, high = 1 << power, (2 << power) - 1
    text = str(low) if low == high else f"{_short(low)} to {_short(high)}"
    return f"{text} {unit}".strip()


def _short(number: int) -> str:
    """A number of bytes or documents, in powers of 1,024 where it is large."""
    for limit, suffix in ((1 << 30, " Gi"), (1 << 20, " Mi"), (1 << 10, " Ki")):
        if number + 1 >= limit:
            return f"{(number + 1) // limit}{suffix}"
    return str(number)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: Any) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f} MB" if value >= 1e5 else f"{value:,} B"
