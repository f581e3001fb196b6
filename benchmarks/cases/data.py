"""How fast the data comes, alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

from benchmarks.cases.case_context import Given
from benchmarks.processes import run
from benchmarks.table_rows import Row, row


def case_stream(given: Given) -> Iterator[Row]:
    """The stream alone on one core, and torchdata's loader over the same samples."""
    yield from _measured("stream", "million tokens/s", given)


def case_order(given: Given) -> Iterator[Row]:
    """Where a sample comes from, by arithmetic: the same cost for any size."""
    yield from _measured("order", "ns/sample", given)


def case_tokenizer(given: Given) -> Iterator[Row]:
    """Turning text into ids on one core."""
    yield from _measured("tokenizer", "MB/s", given)


def _measured(what: str, unit: str, given: Given) -> Iterator[Row]:
    command = ["-m", "benchmarks.data_speed", what, str(given.corpus)]
    runs = [json.loads(run(command, threads=1)) for _ in range(given.rounds)]
    for name in runs[0]:
        yield row(name, unit, [found[name] for found in runs])
