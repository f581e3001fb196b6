"""Peak memory of a step with each memory option; exact, and the same in every run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

from benchmarks.cases.case_context import CaseContext
from benchmarks.corpus import write_corpus
from benchmarks.processes import Task, as_arguments, run, settings_of
from benchmarks.table_rows import NotMeasured, Row, row

TASK = Task(batch=8, steps=3)  # 2,048 tokens a step
SMALL_CHUNKS = {"loss.chunk_tokens": 128}  # so that the logits do not dominate
LARGE_VOCABULARY = 32_768  # with it, the logits dominate the memory of a step
MODES = {
    "none": {},
    'selective "2"': {"mode": "selective", "selective_ac_option": "2"},
    'selective "op"': {"mode": "selective", "selective_ac_option": "op"},
    "memory budget 0.5": {"mode": "memory_budget", "memory_budget": 0.5},  # needs compile
    "full": {"mode": "full"},
}  # offloading is left out: a CPU's activations are in host memory already


def case_memory(context: CaseContext) -> Iterator[Row]:
    """Peak bytes of a step without parameters and optimizer state, per recompute mode and chunk."""
    baseline = None
    for name, keys in MODES.items():
        settings = SMALL_CHUNKS | {
            f"activation_checkpoint.{key}": value for key, value in keys.items()
        }
        if keys.get("mode") == "memory_budget":
            settings |= {"compile.enable": "true", "compile.components": '["model"]'}
        peak = yield from _measure_peak(
            f"activation checkpointing: {name}", context.corpus, settings
        )
        baseline = baseline or peak
        if peak and baseline and name != "none":
            yield row(f"{name} / none", "ratio", [peak / baseline])
    corpus = write_corpus(context.corpus / "wide", LARGE_VOCABULARY, documents=20)
    vocabulary = {"model.vocab_size": LARGE_VOCABULARY}
    label = f"{LARGE_VOCABULARY:,} logits per token"
    unchunked = vocabulary | {"loss.chunk_tokens": 0}
    baseline = yield from _measure_peak(f"{label}, no chunking", corpus, unchunked)
    for tokens in (1024, 256):
        settings = vocabulary | {"loss.chunk_tokens": tokens}
        peak = yield from _measure_peak(f"{label}, chunks of {tokens:,} tokens", corpus, settings)
        if peak and baseline:
            yield row(f"chunks of {tokens:,} tokens / no chunking", "ratio", [peak / baseline])


def _measure_peak(name: str, corpus: Path, settings: dict) -> Generator[Row, None, int | None]:
    """Yield one row; returns its bytes, or None where it could not be measured."""
    keys = settings_of(TASK, corpus, "")
    del keys["job.dump_folder"]  # the probe uses its own
    command = ["-m", "benchmarks.memory_probe", *as_arguments(keys | settings)]
    try:
        peak = int(run(command).splitlines()[-1])
    except NotMeasured as reason:
        yield Row(name, "MB", missed=str(reason))
        return None
    yield row(name, "MB", [peak / 1e6])
    return peak
