"""Arguments of python -m titanlite_lab drill, and the faults that it injects."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from titanlite_lab.commands.drill import parse_drill_arguments
from titanlite_lab.drill.injector import FaultyEngine, Injector, NumericalFault
from titanlite_lab.drill.numerical import names_rank
from titanlite_lab.drill.run import Drill, find_rank_pids, is_running


def test_a_range_without_an_end_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    argv = ["--poison", "480", "--out", str(tmp_path / "out"), "job"]
    with pytest.raises(SystemExit):
        parse_drill_arguments(argv)
    assert "must be FIRST:LAST" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("step 9/60  hardware fault  rank 1  host h  pipeline_rank 0", [1]),
        ("step 9/60  replica mismatch  ranks [0, 2]  hosts ['h', 'h']", [0, 2]),
        ("titanlite: training diverged: the loss on rank 12 (h). Step 2", [12]),
    ],
)
def test_the_rank_that_a_log_line_names_is_found(line, named, monkeypatch):
    assert [rank for rank in range(13) if names_rank(line, rank)] == named


def test_a_fault_of_the_loss_changes_the_cross_entropy():
    injector = Injector(NumericalFault("loss", step=1, value="nan"), rank=0)
    injector.watch(SimpleNamespace(step=0))  # type: ignore[arg-type]
    engine = SimpleNamespace(forward_backward=lambda: torch.tensor([2.0, 0.5]))
    assert FaultyEngine(engine, injector).forward_backward()[0].isnan()


def test_a_drill_that_fails_leaves_no_rank_running(tmp_path, monkeypatch):
    """A rank has a session of its own: killing torchrun's group would not end it."""
    launcher = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time;"
        " time.sleep(600)'], env={**os.environ, 'RANK': '0'}, start_new_session=True).wait()"
    )
    drill = Drill(tmp_path / "out", [], 1, [[]], random.Random(0), 1.0)
    drill.run = subprocess.Popen([sys.executable, "-c", launcher])
    while not (ranks := find_rank_pids(drill.run.pid)):
        time.sleep(0.01)
    drill.kill()
    assert drill.run.returncode == -signal.SIGKILL
    for _ in range(600):
        if not is_running(ranks[0]):
            break
        time.sleep(0.1)
    assert not is_running(ranks[0])


STUB = """
import os, sys, time
if not any(word.startswith("--checkpoint.folder") for word in sys.argv):
    print("step 1  loss 1.0", flush=True)
    time.sleep(600)
ranks = os.environ.get("WORLD_SIZE")
print("another job is writing there" if ranks == "2" else "does not divide", file=sys.stderr)
sys.exit(2)
"""


@pytest.mark.slow
def test_the_second_job_on_a_folder_has_the_ranks_of_the_first(tmp_path, monkeypatch):
    """One process would fail in its checks of the layout, before it asks for the lease."""
    faults, run = (
        import_module("titanlite_lab.drill.faults"),
        import_module("titanlite_lab.drill.run"),
    )
    stub = tmp_path / "train.py"
    stub.write_text(STUB)
    for module in (faults, run):
        monkeypatch.setattr(module, "TRAIN", [str(stub)], raising=False)
    drill = run.Drill(tmp_path / "out", [], 2, [[]], random.Random(0), 0.1)
    try:
        assert "was refused" in faults.share_the_checkpoint_folder(drill)
    finally:
        for pid in run.find_rank_pids(drill.run.pid).values():
            os.kill(pid, signal.SIGKILL)
        drill.run.kill()
