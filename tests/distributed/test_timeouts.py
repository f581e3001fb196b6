"""Timeouts of collectives."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import AsyncMax
from titanlite.distributed.process_group import set_collective_timeouts
from titanlite.job import build, read_job


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


def test_the_first_validation_has_the_timeout_of_the_start(monkeypatch):
    """It compiles graphs of its own."""
    calls: list[object] = []
    monkeypatch.setattr(
        build, "set_collective_timeouts", lambda seconds, excluded: calls.append(seconds)
    )
    monkeypatch.setattr(build, "validate", lambda *_: calls.append("validate") or MagicMock())
    job = read_job([], 1, check_environment=False)
    run = MagicMock()
    actions = build.build_periodic_actions(job, run, [MagicMock()], {}, MagicMock())
    (validation,) = (action for action in actions if action.name == "validate")
    for _ in range(2):
        validation.run(MagicMock())
    start, train = job.config.comm.init_timeout_seconds, job.config.comm.train_timeout_seconds
    assert calls == [start, "validate", train, "validate"] and start > train
    keys = [call.args for call in run.watchdog.set_timeout.call_args_list]
    assert keys == [(start, "comm.init_timeout_seconds"), (train, "comm.train_timeout_seconds")]


def test_train_timeout_applies_to_all_groups_but_the_checkpoint_group():
    assert run_on_ranks(wait_two_seconds, 2)[0] == (True, False, False)
