"""Summary of a corpus for the terminal: its sources, its stages, and the work that is kept."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from titanlite.log import pluralize
from titanlite_corpus.pipeline import CorpusResult
from titanlite_corpus.task import Counts

_SHOWN_RULES = 6  # of what removed most


def summarise_corpus(result: CorpusResult, work: Path) -> str:
    """The content of each source, what each stage did, and the work that is kept."""
    lines = []
    for side in result.published.sides:
        content = f"{pluralize(side.tokens, 'token')} in {pluralize(side.documents, 'document')}"
        folder = f"{side.source}/{side.side}"
        lines.append(f"{folder:24} {content}, {pluralize(side.shards, 'shard')}")
    for stage, counts in result.stages.items():
        lines += _describe_stage(stage, counts)
    if not result.stages:
        lines.append("nothing to do: this recipe's corpus is complete")
    else:
        reused = f", {result.reused_tasks} reused from an earlier run"
        lines.append(
            f"{pluralize(result.tasks, 'task')}{reused if result.reused_tasks else ''},"
            f" {result.seconds:.1f} s"
        )
    if kept := _bytes_on_disk(work):
        lines.append(f"{work}: {kept / 1e6:,.1f} MB, for the next run; --clean removes it")
    return f"{result.out}:\n  " + "\n  ".join(lines)


def _describe_stage(stage: str, counts: Counts) -> Iterator[str]:
    """One line, and one for each thing that was left out."""
    parts = []
    if "documents_out" in counts:
        parts.append(pluralize(counts["documents_out"], "document"))
    if "bytes_out" in counts:
        parts.append(f"{counts['bytes_out'] / 1e6:,.1f} MB")
    if "tokens_out" in counts:
        parts.append(pluralize(counts["tokens_out"], "token"))
        if counts["tokens_out"] and "bytes_in" in counts:
            parts.append(f"{counts['bytes_in'] / counts['tokens_out']:.2f} bytes per token")
    if "documents_truncated" in counts:
        parts.append(f"{counts['documents_truncated']:,} truncated")
    if "padding" in counts:
        concatenated = counts["documents_truncated_if_concatenated"]
        parts[-1] += f" ({concatenated:,} if concatenated)"
        parts.append(f"{pluralize(counts['windows'], 'window')}")
        parts.append(f"{counts['padding'] / max(1, counts['labels']):.2%} padding")
    if parts:
        yield f"{stage:24} {', '.join(parts)}"
    if len(tokenised := counts.get("tokenised", {})) > 1:
        ratios = {name: e["bytes"] / e["tokens"] for name, e in tokenised.items() if e["tokens"]}
        shown = ", ".join(f"{name} {ratios[name]:.2f}" for name in sorted(ratios))
        yield f"  bytes per token: {shown}"
    if removed := counts.get("removed"):
        yield f"  removed: {_most({rule: count['documents'] for rule, count in removed.items()})}"
    if changed := counts.get("changed"):
        yield f"  changed: {_most({rule: count['documents'] for rule, count in changed.items()})}"
    if skipped := counts.get("skipped"):
        yield f"  skipped, could not be read: {_most(skipped)}"
        for kind in skipped:
            yield f"    {counts['samples'][f'read.{kind}'][0]['text']}"


def _most(documents: Mapping[str, int]) -> str:
    """The rules with most documents."""
    rules = sorted(documents, key=lambda rule: (-documents[rule], rule))
    shown = ", ".join(f"{rule} {documents[rule]:,}" for rule in rules[:_SHOWN_RULES])
    more = len(rules) - _SHOWN_RULES
    return f"{shown}, and {pluralize(more, 'rule')} more" if more > 0 else shown


def _bytes_on_disk(folder: Path) -> int:
    """Bytes of the files below a folder that have no other name (a published shard has one)."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            status = os.stat(os.path.join(path, name))
            total += status.st_size if status.st_nlink == 1 else 0
    return total
