"""Time that checkpoints take from the training loop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

from benchmarks.cases.case_context import CaseContext
from benchmarks.processes import run
from benchmarks.table_rows import Row, row


def case_checkpoint(context: CaseContext) -> Iterator[Row]:
    """Time that a 504 MB save by two ranks blocks the loop, and the cost of verification."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    runs = [
        json.loads(run([*launch, "-m", "benchmarks.saving"], threads=1).splitlines()[-1])
        for _ in range(context.rounds)
    ]

    def medians(measurement: str) -> list[float]:
        """The median of each run; the first two values warm up."""
        return [median(seconds[measurement][2:]) for seconds in runs]

    sync = medians("disabled, blocked")
    yield row("saving 504 MB on 2 ranks, disabled: loop blocked", "s", sync)
    for mode in ("async", "async_with_pinned_mem"):
        blocked = medians(f"{mode}, blocked")
        yield row(f"saving, {mode}: loop blocked", "s", blocked)
        first = [seconds[f"{mode}, blocked"][0] for seconds in runs]
        yield row(f"saving, {mode}: loop blocked by the first save", "s", first)
        yield row(f"saving, {mode}: complete after", "s", medians(f"{mode}, written"))
        ratios = [a / b for a, b in zip(blocked, sync, strict=True)]
        yield row(f"loop blocked, {mode} / disabled", "ratio", ratios)
    blocked = medians("memory, blocked")
    yield row("saving in memory, with a copy on another host: loop blocked", "s", blocked)
    yield row("saving in memory: complete after", "s", medians("memory, written"))
    ratios = [a / b for a, b in zip(blocked, sync, strict=True)]
    yield row("loop blocked, memory / disabled", "ratio", ratios)
    off, full = medians("load, verify off"), medians("load, verify full")
    yield row("loading 504 MB, verify off", "s", off)
    ratios = [a / b for a, b in zip(full, off, strict=True)]
    yield row("loading, verify full / off", "ratio", ratios)
