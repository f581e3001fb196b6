"""Arguments of scripts/fault_drill.py, and the faults that it injects."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch

from scripts.drill.injector import FaultyEngine, Injector, NumericalFault
from tests.conftest import ROOT


def test_a_range_without_an_end_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    parse = runpy.run_path(str(ROOT / "scripts" / "fault_drill.py"))["parse_arguments"]
    argv = ["fault_drill.py", "--poison", "480", "--out", str(tmp_path / "out"), "job"]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit):
        parse()
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
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    names_rank = runpy.run_path(str(ROOT / "scripts" / "drill" / "numerical.py"))["names_rank"]
    assert [rank for rank in range(13) if names_rank(line, rank)] == named


def test_a_fault_of_the_loss_changes_the_cross_entropy():
    injector = Injector(NumericalFault("loss", step=1, value="nan"), rank=0)
    injector.watch(SimpleNamespace(step=0))  # type: ignore[arg-type]
    engine = SimpleNamespace(forward_backward=lambda: torch.tensor([2.0, 0.5]))
    assert FaultyEngine(engine, injector).forward_backward()[0].isnan()
