"""Runs a function on several ranks: real processes, real gloo, forked from one warm server.

The server imports torch once for the whole suite; every test then gets fresh processes in a tenth
of a second, so that nothing a test leaves behind (meshes, caches, groups) reaches the next one.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

PRELOAD = [
    "numpy.random",
    "pytest",
    "torch._dynamo",  # which FSDP imports in its first forward: half a second a rank
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchao.float8",
    "titanlite.parallelize",
    "titanlite.training",
    "titanlite.checkpoint",
]
GRACE_SECONDS = 2  # after the first failure, so that its consequences do not hide it


def run_on_ranks(function, ranks: int, *args, timeout: float = 120) -> list:
    """What the module-level `function(*args)` returns on each rank; fails with the first error."""
    context = _forkserver()
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (there, rank, ranks, str(Path(folder) / "store"), sys.path, timeout)
            named = (function.__module__, function.__qualname__, args)
            process = context.Process(target=_rank, args=(*arguments, *named), daemon=True)
            process.start()
            there.close()
            connections.append(here)
            processes.append(process)
        try:
            return _collect(connections, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _forkserver():
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited by the server and what it forks
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
                well, results[rank] = connection.recv()
            except EOFError:
                well, results[rank] = False, "the process died"
            if not well:
                failures[rank] = results[rank]
                deadline = min(deadline, time.time() + GRACE_SECONDS)
    if failures:
        rank, text = next(iter(failures.items()))
        raise AssertionError(f"rank {rank} failed first:\n{text}")
    if pending:
        raise AssertionError(f"ranks {sorted(pending)} did not finish in {timeout} s (hang)")
    return results


def _rank(connection, rank, ranks, store, path, timeout, module, name, args):
    sys.path[:] = path
    gc.freeze()  # or looking through all that the server imported copies it into each rank
    import torch
    import torch.distributed as dist

    log = tempfile.TemporaryFile("w+")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        answer = (True, getattr(importlib.import_module(module), name)(*args))
    except BaseException as error:
        log.seek(0)
        said = "".join(traceback.format_exception(error))
        answer = (False, f"{said}\n--- what it printed ---\n{log.read()[-3000:]}")
    connection.send(answer)
    time.sleep(timeout)  # stay until all have answered: leaving would look like another failure
