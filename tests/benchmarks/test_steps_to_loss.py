"""The comparison of optimizers by the steps that they need."""

from __future__ import annotations

import pytest

from benchmarks.steps_to_loss import OptimizerRun, best_of, prepare, table_of, train
from conftest import ROOT


def test_steps_are_interpolated_and_a_loss_that_is_never_reached_is_none():
    run = OptimizerRun("AdamW", 1e-3, (10, 20, 30), (4.0, 3.0, 2.0), (1.0, 2.0, 4.0))
    assert run.reach(2.5) == (25.0, pytest.approx(3.0)) and run.reach(4.5) == (10, 1.0)
    assert run.reach(1.0) is None
    faster = OptimizerRun("Muon", 2e-3, (10, 20, 30), (3.0, 2.0, 1.0), (2.0, 4.0, 6.0))
    worse = OptimizerRun("Muon", 9e-3, (10, 20, 30), (3.0, 2.0, 1.5), (2.0, 4.0, 6.0))
    assert best_of([worse, faster]) is faster
    assert "| Muon | 0.002 | 1.000 | 20 | 0.667 | 4 | 1.5 |" in table_of([run, worse, faster])


def test_a_run_is_trained_and_read(tmp_path):
    job = prepare(sorted((ROOT / "docs").rglob("*.md"))[:12], tmp_path / "corpus")
    run = train("AdamW", 1e-3, 4, job, tmp_path)
    assert run.steps == (1, 2, 3, 4) and 4 < run.losses[-1] < run.losses[0] < 6
    assert list(run.seconds) == sorted(run.seconds)
