"""Trains a job as rank 0 on a fake GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from benchmarks.gpu_bytes.fake_cuda import DEVICE, Trace, fake_ranks
from titanlite.distributed.process_group import RankContext
from titanlite.job import open_run, read_job
from titanlite.job.build import RunServices
from titanlite.runtime import HeartbeatWatchdog, RunFolderLock
from titanlite.runtime.membership import Members
from titanlite.training.loop import train
from titanlite.training.state import Counters


def trace_run(trace: Trace, settings: list[str], ranks: int) -> dict[str, Any]:
    """Train a job as rank 0 of `ranks`, as train.py does, and return what its second step did.

    That is the steady state if it does not log: the first step compiles, allocates and logs.
    """
    job = read_job(settings, ranks, here=False)
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(job.config.debug.deterministic)
    graphs: dict[int, int] = {}  # step -> graphs compiled until its end
    timeout = job.config.comm.init_timeout_seconds
    watchdog = HeartbeatWatchdog(0, ranks, timeout, job.folder)  # not started: knows the position

    def position() -> tuple[int, str]:
        now = watchdog._progress.position
        graphs[now.step] = counters["stats"]["unique_graphs"]
        return now.step, now.phase

    trace.restart(position)
    with fake_ranks(ranks):
        state = Counters()
        services = RunServices(
            RankContext(0, ranks, DEVICE),
            watchdog,
            RunFolderLock(job.folder, [], lambda: state.step),
            Members(()),
            state,
            deadline=None,
            memory_advice=[],
        )
        with open_run(job, services) as run:
            train(run)
    last = job.config.training.steps
    return {
        "steps": state.step,
        "operations": trace.operations[2],
        "waits": trace.waits_of(2),
        "waits_when_logging": trace.waits_of(last),
        "collectives": trace.collectives_of(2),
        "attention": trace.attention_of(2),
        "graphs": graphs[1] - graphs[0],
        "later_graphs": graphs[last] - graphs[2],
    }
