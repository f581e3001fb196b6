"""A run that runs out of memory reports the settings that need less, and all ranks end."""

from __future__ import annotations

import os
import sys

import pytest

from tests.faults.launch import LaunchedRun

EXTRA_BYTES = 1 << 30  # that rank 1 may allocate


class PrintingProfiler:
    """A profiler that prints the error that it is left with."""

    def __enter__(self) -> PrintingProfiler:
        return self

    def __exit__(self, kind, error, trace) -> None:
        name = "no error" if kind is None else kind.__name__
        print(f"profiler of rank {os.environ['RANK']} left with {name}", file=sys.stderr)

    def step(self) -> None: ...


def add_profiler() -> None:
    """Add a profiler to the run, as [profiling] enable_memory_snapshot does on a GPU."""
    from titanlite.job import build

    build.build_profilers = lambda *args: {"printing": PrintingProfiler()}


@pytest.mark.skipif(sys.platform != "linux", reason="sets Linux process limits")
def test_out_of_memory_on_one_rank_names_settings_that_help_and_ends_the_others(run_toml, tmp_path):
    argv = ("--job.config_file", str(run_toml), "--model.vocab_size", "100000")
    argv += ("--loss.chunk_tokens", "0")
    argv += ("--training.local_batch_size", "32", "--training.global_batch_size", "64")
    limits = {"extra_bytes": {1: EXTRA_BYTES}, "prepare": add_profiler}
    with LaunchedRun(2, tmp_path / "out", *argv, **limits) as run:
        codes = run.wait()
    assert codes[1] == 2 and codes[0] in (1, 2), run.output
    assert "rank 1: titanlite: out of memory at step 1, " in run.output, run.output
    assert "training.local_batch_size = 16" in run.output
    assert "loss.chunk_tokens = 1024" in run.output
    # A memory snapshot is written only if the profiler sees the original error.
    assert "profiler of rank 1 left with RuntimeError" in run.output, run.output
    assert "parameters" in run.output and "Traceback" not in run.output, run.output
