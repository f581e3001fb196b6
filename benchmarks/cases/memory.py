"""Peak memory of a step under each memory option; exact, and the same in every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases.case_context import CaseContext
from benchmarks.corpus import write_corpus
from benchmarks.processes import Task, as_arguments, run, settings_of
from benchmarks.table_rows import NotMeasured, Row, row

TASK = Task(batch=8, steps=3)  # 2,048 tokens a step
SMALL_LOSS = {"loss.chunk_tokens": 128}  # so that the logits do not dominate
WIDE = 32_768  # vocabulary size at which the logits dominate the memory of a step
MODES = {
    "none": {},
    'selective "2"': {"mode": "selective", "selective_ac_option": "2"},
    'selective "op"': {"mode": "selective", "selective_ac_option": "op"},
    "memory budget 0.5": {"mode": "memory_budget", "memory_budget": 0.5},  # needs compile
    "full": {"mode": "full"},
}  # offloading is left out: a CPU's activations are in host memory already


def case_memory(context: CaseContext) -> Iterator[Row]:
    """Peak bytes of a step without parameters and optimizer state, per recompute mode and chunk."""
    whole = None
    for name, keys in MODES.items():
        settings = SMALL_LOSS | {
            f"activation_checkpoint.{key}": value for key, value in keys.items()
        }
        if keys.get("mode") == "memory_budget":
            settings |= {"compile.enable": "true", "compile.components": '["model"]'}
        found = yield from _measure_peak(
            f"activation checkpointing: {name}", context.corpus, settings
        )
        whole = whole or found
        if found and whole and name != "none":
            yield row(f"{name} / none", "ratio", [found / whole])
    corpus = write_corpus(context.corpus / "wide", WIDE, documents=20)
    vocabulary = {"model.vocab_size": WIDE}
    label = f"{WIDE:,} logits per token"
    every = vocabulary | {"loss.chunk_tokens": 0}
    whole = yield from _measure_peak(f"{label}, no chunking", corpus, every)
    for tokens in (1024, 256):
        settings = vocabulary | {"loss.chunk_tokens": tokens}
        found = yield from _measure_peak(f"{label}, chunks of {tokens:,} tokens", corpus, settings)
        if found and whole:
            yield row(f"chunks of {tokens:,} tokens / no chunking", "ratio", [found / whole])


def _measure_peak(name: str, corpus: Path, settings: dict):
    """Yield the row; return its bytes, or None where it could not be measured."""
    keys = settings_of(TASK, corpus, "")
    del keys["job.dump_folder"]  # the probe uses its own
    command = ["-m", "benchmarks.memory_probe", *as_arguments(keys | settings)]
    try:
        held = int(run(command).splitlines()[-1])
    except NotMeasured as why:
        yield Row(name, "MB", missed=str(why))
        return None
    yield row(name, "MB", [held / 1e6])
    return held
