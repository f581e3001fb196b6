"""Starts train.py on several ranks as torchrun does, in a tenth of its time.

The ranks are forked from the warm server of `tests/distributed/ranks.py`. The store they meet at is
kept here, as torchrun's agent keeps it, so that it outlives any of them.
"""

from __future__ import annotations

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

from tests.distributed.ranks import _forkserver


def open_store() -> dist.TCPStore:
    """On loopback only, where torch's own listens on every interface."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, options = listener.getsockname()[1], {"master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, **options)


class Launched:
    """Some ranks of one run."""

    def __init__(
        self,
        ranks: int,
        folder: Path,
        *argv: str,
        store: dist.TCPStore | None = None,
        room: dict[int, int] | None = None,  # bytes by rank that it may still address
        longest_file: int = resource.RLIM_INFINITY,  # bytes; longer ones fail, as on a full disk
        prepare: Callable[[], None] | None = None,  # called in each rank first
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
                    (room or {}).get(rank),
                    longest_file,
                    prepare,
                ),
            )
            for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait(self, seconds: float = 60, besides: tuple[int, ...] = ()) -> list[int | None]:
        """Exit codes, once all have ended but those `besides`; fails when they do not."""
        end = time.monotonic() + seconds
        others = [p for rank, p in enumerate(self.processes) if rank not in besides]
        for process in others:
            process.join(max(0.0, end - time.monotonic()))
        alive = [p.pid for p in others if p.is_alive()]
        codes = [process.exitcode for process in self.processes]
        if alive:
            self.end()
            raise AssertionError(f"{alive} have not ended in {seconds} s; {codes}\n{self.said}")
        return codes

    def wait_for(self, seen, seconds: float = 60) -> None:
        """Until `seen()`; fails when it does not come, or the run ends before."""
        end = time.monotonic() + seconds
        while not seen():
            assert any(p.is_alive() for p in self.processes), f"ended before:\n{self.said}"
            assert time.monotonic() < end, f"did not come:\n{self.said}"
            time.sleep(0.01)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *raised) -> None:
        self.end()


def _train(rank, ranks, port, path, log, argv, room, longest_file, prepare) -> None:
    sys.path[:] = path
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

    torch.set_num_threads(1)
    if prepare:
        prepare()
    if room is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest_file, hard))
    code = train.main(list(argv))
    sys.stderr.flush()
    os._exit(code)


def lines_of(folder: Path) -> list[dict]:
    """metrics.jsonl of a run, without a line that is being written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in lines_of(folder) if "event" not in line]


def events_of(folder: Path, name: str) -> list[dict]:
    return [line for line in lines_of(folder) if line.get("event") == name]
