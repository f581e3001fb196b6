"""Traces of tiny jobs on a fake GPU: starts the worker, and asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_bytes.preload import compile_preload
from titanlite.data import open_tokenizer
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

ROOT = Path(__file__).parents[2]
JOB = """
[job]
dump_folder = "{folder}/out"
device = "cuda"
[model]
dim = 64
n_layers = 1
n_heads = 4
n_kv_heads = 2
vocab_size = 258
[data]
tokenizer = "bytes"
sources = [{{ name = "text", path = "{folder}/corpus" }}]
[training]
seq_len = 64
local_batch_size = 2
steps = 3
[attention]
backend = "flash"
[metrics]
log_freq = 1000
"""


class TraceWorker:
    """A process with a fake GPU, which trains one job after the other."""

    def __init__(self, folder: Path):
        library, self._log = compile_preload(folder), folder / "log"
        if library is None:
            pytest.skip("needs a machine without a GPU, and g++")
        self._job_file = write_job(folder)
        environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda_trace.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            env=environment,
            cwd=ROOT,
            text=True,
        )
        self._replies: dict[tuple[str, int], dict[str, Any]] = {}

    def trace(self, settings: str, ranks: int = 1) -> dict[str, Any]:
        """What the second step of the job does with these settings; see `trace_run`."""
        if "model.name" not in settings:
            settings += " model.hidden_dim=128"
        if (settings, ranks) in self._replies:
            return self._replies[settings, ranks]
        arguments = [f"--{setting}" for setting in settings.split()]
        arguments = ["--job.config_file", str(self._job_file), *arguments]
        request = {"settings": arguments, "ranks": ranks}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline() or '{"error": "the worker died"}')
        if "error" in reply:
            raise AssertionError(f"{reply['error']}\n{self._log.read_text()[-3000:]}")
        self._replies[settings, ranks] = reply
        return reply

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def write_job(folder: Path) -> Path:
    """Write a corpus of short documents and a job that trains on it; return the job's TOML."""
    tokenizer, corpus = open_tokenizer("bytes"), folder / "corpus"
    corpus.mkdir()
    (folder / "out").mkdir()
    with ShardWriter(corpus / "shard", tokenizer.vocab_size) as writer:
        for number in range(400):
            writer.add([*tokenizer.encode(f"document {number}"), tokenizer.eos_id])
        record = writer.close()
    write_corpus_manifest(corpus, tokenizer.fingerprint, tokenizer.vocab_size, [record])
    path = folder / "job.toml"
    path.write_text(JOB.format(folder=folder))
    return path
