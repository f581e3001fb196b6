"""Starts train.py on several ranks as torchrun does, in a tenth of its time.

The ranks are forked from the server of `tests/distributed/ranks.py`, which has torch imported. As
with torchrun, the store of the ranks is in the parent process, and outlives all of them.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from conftest import HANG_SECONDS
from tests.distributed.ranks import _forkserver


def open_store() -> dist.TCPStore:
    """Open a store that listens on loopback only; torch itself would listen on every interface."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, options = listener.getsockname()[1], {"master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, **options)


class LaunchedRun:
    """The processes of one run, one per rank."""

    def __init__(
        self,
        ranks: int,
        folder: Path,
        *argv: str,
        store: dist.TCPStore | None = None,
        extra_bytes: dict[int, int]
        | None = None,  # by rank: address space beyond that at its start
        max_file_bytes: int = resource.RLIM_INFINITY,  # writing more fails, as on a full disk
        prepare: Callable[[], None] | None = None,  # called in each rank before train.main
    ):
        self.store = store or open_store()
        self.folder, self.log = folder, folder.with_name(f"{folder.name}.{time.monotonic_ns()}.log")
        context = _forkserver()
        self.processes = [
            context.Process(
                target=_train,
                args=(
                    rank,
                    ranks,
                    self.store.port,
                    sys.path,
                    str(self.log),
                    argv,
                    (extra_bytes or {}).get(rank),
                    max_file_bytes,
                    prepare,
                ),
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(
        self, seconds: float = HANG_SECONDS, excluded: tuple[int, ...] = ()
    ) -> list[int | None]:
        """Wait until all ranks but `excluded` have ended; returns the exit codes of all."""
        deadline = time.monotonic() + seconds
        waited = [p for rank, p in enumerate(self.processes) if rank not in excluded]
        for process in waited:
            process.join(max(0.0, deadline - time.monotonic()))
        alive = [p.pid for p in waited if p.is_alive()]
        codes = [process.exitcode for process in self.processes]
        if alive:
            self.end()
            raise AssertionError(
                f"processes {alive} still run after {seconds} s; exit codes {codes}\n{self.output}"
            )
        return codes

    def wait_for(self, condition, seconds: float = HANG_SECONDS) -> None:
        """Wait until `condition()`; fails after `seconds`, or if the run ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert any(p.is_alive() for p in self.processes), f"ended before:\n{self.output}"
            assert time.monotonic() < deadline, f"timed out:\n{self.output}"
            time.sleep(0.01)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def __enter__(self) -> LaunchedRun:
        return self

    def __exit__(self, *raised) -> None:
        self.end()


def _train(rank, ranks, port, path, log, argv, extra_bytes, max_file_bytes, prepare) -> None:
    sys.path[:] = path
    gc.freeze()  # else gc would touch, and so copy, the pages that ranks share with the server
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    import torch

    import train
    from titanlite.metrics import throughput

    torch.set_num_threads(1)
    # for mfu, which no test of runs reads; it takes a quarter of a second
    throughput.measure_matmul_flops = lambda dtype, device: 1e12
    if prepare:
        prepare()
    if extra_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, hard))
    code = train.main(list(argv))
    sys.stderr.flush()
    os._exit(code)


def lines_of(folder: Path) -> list[dict]:
    """Lines of metrics.jsonl, without one that is still being written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder) if "event" not in line]


def events_of(folder: Path, name: str) -> list[dict]:
    return [line for line in lines_of(folder) if line.get("event") == name]
