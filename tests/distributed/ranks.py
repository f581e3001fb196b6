"""Run a function on several ranks: real processes with gloo, forked from one preloaded server.

The server imports torch once for all tests. Every test then gets new processes in 0.1 s, so that
its meshes, caches and groups do not affect the next one.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from conftest import HANG_SECONDS

PRELOAD = [
    "numpy.random",
    "pytest",
    "tests.fast_matmul",
    "torch._dynamo",  # FSDP imports it in its first forward: 0.5 s per rank
    "functorch.compile",  # torch.compile imports these with any backend: 2 s per rank
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchao.float8",
    "titanlite.parallelize",
    "titanlite.job",
    "tests.distributed.oracle",
    "titanlite.checkpoint",
]
GRACE_SECONDS = 2  # wait after the first failure, to report the cause and not a consequence


def run_on_ranks(
    function, ranks: int, *args, timeout: float = HANG_SECONDS, on_demand: bool = False
) -> list:
    """Results of the module-level `function(*args)` on each rank; raises the first error.

    `on_demand`: connect two ranks when they first exchange data, as a run does.
    """
    context = _forkserver()
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for rank in range(ranks):
            parent_end, child_end = context.Pipe()
            arguments = (child_end, rank, ranks, str(Path(folder) / "store"), sys.path, timeout)
            named = (on_demand, function.__module__, function.__qualname__, args)
            process = context.Process(target=_run_rank, args=(*arguments, *named), daemon=True)
            process.start()
            child_end.close()
            connections.append(parent_end)
            processes.append(process)
        try:
            return _collect(connections, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _forkserver():
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the server and its forks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _collect(connections: list[Connection], timeout: float) -> list:
    results: list = [None] * len(connections)
    pending, failures, deadline = set(range(len(connections))), {}, time.time() + timeout
    while pending and time.time() < deadline:
        for connection in wait([connections[rank] for rank in pending], 0.2):
            rank = connections.index(connection)
            pending.discard(rank)
            try:
                succeeded, results[rank] = connection.recv()
            except EOFError:
                succeeded, results[rank] = False, "the process died"
            if not succeeded:
                failures[rank] = results[rank]
                deadline = min(deadline, time.time() + GRACE_SECONDS)
    if failures:
        rank, text = next(iter(failures.items()))
        if reason := re.search("splits the backward, which needs [^']*", text):
            pytest.skip(reason[0])
        raise AssertionError(f"rank {rank} failed first:\n{text}")
    if pending:
        raise AssertionError(f"ranks {sorted(pending)} did not finish in {timeout} s (hang)")
    return results


def share_gloo_device() -> None:
    """Let all groups of this process send and receive in one thread.

    gloo starts a thread for each group, which wakes 100 times a second. Layouts that share their
    processes have dozens of groups: their idle threads took a quarter of the CPU time.
    """
    from torch.distributed import ProcessGroupGloo

    start = ProcessGroupGloo.__init__
    device = ProcessGroupGloo.create_default_device(lazy_init=False)  # a shared lazy one hangs

    def start_with_device(group, store, rank, size, timeout):
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        start(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = start_with_device


def _run_rank(connection, rank, ranks, store, path, timeout, on_demand, module, name, args):
    sys.path[:] = path
    gc.freeze()  # else gc would touch, and so copy, the pages that ranks share with the server
    import torch
    import torch.distributed as dist

    from tests.fast_matmul import compute_matmuls_in_fp32
    from titanlite.distributed.rendezvous import connect_gloo_on_demand

    log = tempfile.TemporaryFile("w+")  # noqa: SIM115, open until the process is killed
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    compute_matmuls_in_fp32()
    connect_gloo_on_demand() if on_demand else share_gloo_device()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        result = (True, getattr(importlib.import_module(module), name)(*args))
    except BaseException as error:
        log.seek(0)
        error_text = "".join(traceback.format_exception(error))
        result = (False, f"{error_text}\n--- output of this rank ---\n{log.read()[-3000:]}")
    connection.send(result)
    time.sleep(timeout)  # until the parent kills it: an exit would make the other ranks fail
