"""One Markdown report that can be pasted into an issue."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gpu_check.outcome import Outcome
from benchmarks.table_rows import grid, list_entries


def report(entries: Mapping[str, str], topology: str, outcomes: Sequence[Outcome]) -> str:
    """The report: what failed comes first, with its log."""
    parts = [f"# GPU check: {summary(outcomes)}\n", list_entries(entries).rstrip() + "\n"]
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    if failed:
        parts += ["## What failed\n", *(_failure(outcome) for outcome in failed)]
    parts += ["## All checks\n", _table(outcomes)]
    if topology:
        parts += ["## Topology\n", _fenced(topology)]
    return "\n".join(parts)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Such as "12 passed, 1 failed, 3 skipped"."""
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))


def gpu_topology() -> str:
    """How the GPUs are connected, as nvidia-smi prints it; empty without it."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "topo", "-m"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        (o.name, o.status, o.result.replace("|", "/"), f"{o.seconds:.1f}" if o.seconds else "")
        for o in outcomes
    ]
    return grid(("check", "status", "result", "s"), lines, "lllr")


def _failure(outcome: Outcome) -> str:
    log = f"\n{_fenced(outcome.log)}" if outcome.log else ""
    return f"**{outcome.name}**: {outcome.result}\n{log}"


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:  # a log may contain fences
        fence += "`"
    return f"{fence}text\n{text}\n{fence}\n"
