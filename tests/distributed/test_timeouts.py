"""Timeouts of collectives."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import AsyncMax
from titanlite.distributed.process_group import set_collective_timeouts


def wait_two_seconds() -> tuple[bool, ...]:
    """Whether rank 0 waits for rank 1 in the excluded group, in another one and in the default one.

    They are connected before, because connecting has the timeout that a group was created with.
    """
    excluded = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    agreement = AsyncMax()

    def agree() -> None:
        agreement.start(0)
        agreement.wait()

    exchanges = (lambda: dist.all_reduce(torch.ones(1), group=excluded), agree, dist.barrier)
    for exchange in exchanges:
        exchange()
    set_collective_timeouts(1, excluded=excluded)
    waited = []
    for exchange in exchanges:
        if dist.get_rank():
            time.sleep(2)
        try:
            exchange()
            waited.append(True)
        except RuntimeError:
            waited.append(False)
    return tuple(waited)


def test_train_timeout_applies_to_all_groups_but_the_checkpoint_group():
    assert run_on_ranks(wait_two_seconds, 2)[0] == (True, False, False)
