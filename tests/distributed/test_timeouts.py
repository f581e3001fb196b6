"""Who waits how long for whom."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.process_group import set_collective_timeouts


def late_by_two_seconds() -> tuple[bool, bool]:
    """Whether rank 0 waits for rank 1 in the group that is spared, and in the other one."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    set_collective_timeouts(1, excluded=patient)
    waited = []
    for group in (patient, None):
        if dist.get_rank():
            time.sleep(2)
        try:
            dist.all_reduce(torch.ones(1), group=group)
            waited.append(True)
        except RuntimeError:
            waited.append(False)
    return tuple(waited)


def test_after_the_first_step_only_the_writing_of_checkpoints_may_take_long():
    assert run_on_ranks(late_by_two_seconds, 2)[0] == (True, False)
