"""What ranks report of a fault, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from titanlite.distributed import error_report
from titanlite.errors import EXIT_DIVERGED, TrainingDiverged
from titanlite.guard.culprit import Culprit, recording_outputs
from titanlite.guard.handler import Guard
from titanlite.guard.policy import GuardConfig, History


@pytest.mark.parametrize(
    ("faulty", "text"),
    [
        (Culprit(), "of an unknown host: at step 7, the reduction over ranks had other bits"),
        (Culprit(3, "node-1"), "of node-1: at step 7, the gradient on rank 3 (node-1) had other"),
    ],
)
def test_a_fault_of_the_reduction_over_ranks_is_named(faulty, text):
    """Only the totals differ in the replay, so no rank is the culprit."""
    handler = SimpleNamespace(
        _judge=SimpleNamespace(config=GuardConfig(max_hardware_faults=1)),
        _run=SimpleNamespace(
            sinks=SimpleNamespace(event=lambda *args, **fields: None),
            finish_save=lambda step: None,
        ),
    )
    step = SimpleNamespace(loss=torch.tensor(1.0), grad_norm=torch.tensor(2.0))
    history = History(hardware_faults={faulty.host: 1})
    with pytest.raises(TrainingDiverged) as error:
        Guard._report_fault(handler, SimpleNamespace(step=7, result=step), step, faulty, history)
    assert text in str(error.value)


def test_an_output_without_elements_is_neither_good_nor_bad():
    """As of experts that get no tokens."""
    model = torch.nn.ModuleDict({"output": torch.nn.Linear(4, 4)})
    with recording_outputs(model, inside_layers=True) as calls:
        model["output"](torch.ones(0, 4))
        model["output"](torch.full((1, 4), torch.nan))
    assert [bool(call.is_good) for call in calls] == [False]


def test_an_error_of_all_ranks_is_printed_where_rank_0_does_not_answer(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(error_report, "RANK_0_SECONDS", 0.1)
    error = TrainingDiverged("the loss is NaN.").mark_on_all_ranks()
    report = error_report.ErrorReport()
    report.wait_for_rank_0(error, dist.HashStore())
    assert report.finish(error) == EXIT_DIVERGED
    assert capsys.readouterr().err.count("the loss is NaN.") == 1
