"""Speed of the data pipeline alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.cases.case_context import CaseContext
from benchmarks.processes import run
from benchmarks.table_rows import Row, row


def case_stream(context: CaseContext) -> Iterator[Row]:
    """The sample stream on one core, and torchdata's loader over the same samples."""
    yield from _measure("stream", "million tokens/s", context)


def case_order(context: CaseContext) -> Iterator[Row]:
    """Time to compute which source a sample comes from; independent of the corpus size."""
    yield from _measure("order", "ns/sample", context)


def case_tokenizer(context: CaseContext) -> Iterator[Row]:
    """Tokenization on one core."""
    yield from _measure("tokenizer", "MB/s", context)


def _measure(part: str, unit: str, context: CaseContext) -> Iterator[Row]:
    command = ["-m", "benchmarks.data_speed", part, str(context.corpus)]
    runs = [json.loads(run(command, threads=1)) for _ in range(context.rounds)]
    for name in runs[0]:
        yield row(name, unit, [figures[name] for figures in runs])
