"""What the guard reports of a step that had other bits in its replay, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from titanlite.errors import TrainingDiverged
from titanlite.guard.culprit import Culprit
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
