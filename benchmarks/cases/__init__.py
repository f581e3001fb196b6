"""All benchmark cases by name, for `--case`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.cases.case_context import CaseContext
from benchmarks.cases.data import case_order, case_stream, case_tokenizer
from benchmarks.cases.memory import case_memory
from benchmarks.cases.saving import case_checkpoint
from benchmarks.cases.speed import (
    case_compile,
    case_fsdp,
    case_guard,
    case_trainer,
    case_trainer_gpu,
)
from benchmarks.table_rows import Row

CPU_CASES: dict[str, Callable[[CaseContext], Iterator[Row]]] = {
    "trainer": case_trainer,
    "fsdp": case_fsdp,
    "compile": case_compile,
    "guard": case_guard,
    "memory": case_memory,
    "checkpoint": case_checkpoint,
    "stream": case_stream,
    "order": case_order,
    "tokenizer": case_tokenizer,
}
CASES = CPU_CASES | {
    "trainer-gpu": case_trainer_gpu
}  # all cases that yield a `Row`; gpu.py has its own rows
