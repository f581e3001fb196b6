"""Timeouts of collectives."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from tests.faults.launch import LaunchedRun
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
    set_collective_timeouts(1, excluded=[excluded])
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


def print_limits() -> None:
    """Print the limit of the watchdog and of gloo at each forward and backward or validation."""
    from titanlite.runtime.heartbeat import RankProgress
    from titanlite.training.spmd_engine import SpmdEngine

    forward_backward, evaluate, set_timeout = (
        *(SpmdEngine.forward_backward, SpmdEngine.evaluate),
        RankProgress.set_timeout,
    )
    watched = []

    def keep(self, seconds, key):
        watched.append(int(seconds))
        set_timeout(self, seconds, key)

    def printed(name, function):
        def call(self, *arguments):
            gloo = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
            print("limits", name, watched[-1] if watched else "-", gloo.seconds, flush=True)
            return function(self, *arguments)

        return call

    SpmdEngine.forward_backward = printed("step", forward_backward)
    SpmdEngine.evaluate = printed("validation", evaluate)
    RankProgress.set_timeout = keep


def test_the_first_validation_has_the_timeout_of_the_start(run_toml, tmp_path):
    """It compiles graphs of its own."""
    limits = ("--comm.init_timeout_seconds", "5000", "--comm.train_timeout_seconds", "4000")
    argv = ("--job.config_file", str(run_toml), *limits, "--validation.freq", "2")
    argv += ("--training.steps", "4", "--checkpoint.enable", "false")
    with LaunchedRun(1, tmp_path / "out", *argv, prepare=print_limits) as run:
        assert run.wait() == [0], run.output
        printed = [line for line in run.output.splitlines() if line.startswith("limits")]
    short = "4000 4000"
    assert [line for line, _ in itertools.groupby(printed)] == [
        "limits step - 5000",
        f"limits step {short}",
        "limits validation 5000 5000",
        f"limits step {short}",
        f"limits validation {short}",
    ]


def test_train_timeout_applies_to_all_groups_but_the_checkpoint_group():
    assert run_on_ranks(wait_two_seconds, 2)[0] == (True, False, False)
