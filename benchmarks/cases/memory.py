"""What a step must hold, in each way of holding less. Exact and the same on every run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases.case_context import Given
from benchmarks.corpus import write_corpus
from benchmarks.processes import Task, run, settings_of, words_of
from benchmarks.table_rows import Missed, Row, row

TASK = Task(batch=8, steps=3)  # 2,048 tokens a step
FEW = {"loss.chunk_tokens": 128}  # so that the logits are not what is seen
WIDE = 32_768  # ids; enough for the logits to be most of what a step holds
MODES = {
    "none": {},
    'selective "2"': {"mode": "selective", "selective_ac_option": "2"},
    'selective "op"': {"mode": "selective", "selective_ac_option": "op"},
    "memory budget 0.5": {"mode": "memory_budget", "memory_budget": 0.5},  # needs compile
    "full": {"mode": "full"},
}  # offloading is left out: on a CPU what is saved is in host memory already


def case_memory(given: Given) -> Iterator[Row]:
    """Peak bytes of a step beyond weights and moments, by way of recomputing and of the loss."""
    whole = None
    for name, keys in MODES.items():
        settings = FEW | {f"activation_checkpoint.{key}": value for key, value in keys.items()}
        if keys.get("mode") == "memory_budget":
            settings |= {"compile.enable": "true", "compile.components": '["model"]'}
        found = yield from _held(f"activation checkpointing: {name}", given.corpus, settings)
        whole = whole or found
        if found and whole and name != "none":
            yield row(f"{name} / none", "ratio", [found / whole])
    corpus = write_corpus(given.corpus / "wide", WIDE, documents=20)
    vocabulary = {"model.vocab_size": WIDE}
    words = f"{WIDE:,} logits a token"
    every = vocabulary | {"loss.chunk_tokens": 0}
    whole = yield from _held(f"{words}, all tokens at once", corpus, every)
    for tokens in (1024, 256):
        settings = vocabulary | {"loss.chunk_tokens": tokens}
        found = yield from _held(f"{words}, {tokens:,} tokens at once", corpus, settings)
        if found and whole:
            yield row(f"{tokens:,} tokens of logits at once / all", "ratio", [found / whole])


def _held(name: str, corpus: Path, settings: dict):
    """Yields the row; returns its bytes, or None where it could not be measured."""
    keys = settings_of(TASK, corpus, "")
    del keys["job.dump_folder"]  # the probe has one of its own
    command = ["-m", "benchmarks.memory_probe", *words_of(keys | settings)]
    try:
        held = int(run(command).splitlines()[-1])
    except Missed as why:
        yield Row(name, "MB", missed=str(why))
        return None
    yield row(name, "MB", [held / 1e6])
    return held
