"""Timeouts of collectives."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.process_group import set_collective_timeouts


def wait_two_seconds() -> tuple[bool, ...]:
    """Whether rank 0 waits for rank 1 in the excluded group, and in the default group."""
    excluded = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    set_collective_timeouts(1, excluded=excluded)
    waited = []
    for group in (excluded, None):
        if dist.get_rank():
            time.sleep(2)
        try:
            dist.all_reduce(torch.ones(1), group=group)
            waited.append(True)
        except RuntimeError:
            waited.append(False)
    return tuple(waited)


def test_train_timeout_applies_to_all_groups_but_the_checkpoint_group():
    assert run_on_ranks(wait_two_seconds, 2)[0] == (True, False)
