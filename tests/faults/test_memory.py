"""A run that is out of memory reports figures and advice, and ends on every rank."""

from __future__ import annotations

import sys

import pytest

from tests.faults.launch import Launched

ROOM = 1 << 30  # bytes that rank 1 may address beside what it does when it begins


@pytest.mark.skipif(sys.platform != "linux", reason="limits of a process are Linux's")
def test_an_out_of_memory_rank_reports_advice_and_ends_the_others(run_toml, tmp_path):
    words = ("--job.config_file", str(run_toml), "--model.vocab_size", "100000")
    words += ("--loss.chunk_tokens", "0")
    words += ("--training.local_batch_size", "32", "--training.global_batch_size", "64")
    with Launched(2, tmp_path / "out", *words, room={1: ROOM}) as run:
        codes = run.wait(90)
    assert codes[1] == 2 and codes[0] in (1, 2), run.said
    assert "rank 1: titanlite: out of memory at step 1, " in run.said, run.said
    assert "training.local_batch_size = 16" in run.said
    assert "loss.chunk_tokens = 1024" in run.said
    assert "parameters" in run.said and "Traceback" not in run.said, run.said
