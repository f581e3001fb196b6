"""Ranks that the layout cannot use wait as spares.

torchrun leaves a machine out of its next rendezvous once all ranks there have exited. So a spare
exits with the run, and with its exit code.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time

import torch.distributed as dist

from titanlite.distributed import rendezvous
from titanlite.errors import EXIT_RANK_LOST, EXIT_STOPPED


def wait_if_spare(ranks: int, timeout_seconds: float) -> int | None:
    """On a rank after the first `ranks`: wait until the run has ended; returns its exit code.

    Returns None on the others, and makes `ranks` their world size.
    """
    rank, launched = rendezvous.launched_rank_and_world_size()
    if ranks == launched:
        return None
    first = rank - int(os.environ.get("LOCAL_RANK", 0))  # of this machine
    end = first + int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if rank < ranks:
        os.environ["WORLD_SIZE"] = str(ranks)
        os.environ["LOCAL_WORLD_SIZE"] = str(min(end, ranks) - first)
        os.environ[rendezvous.SPARES_VARIABLE] = str(launched - ranks)
        return None
    if rank == max(first, ranks):
        print(f"ranks {rank}-{end - 1} wait as spares", file=sys.stderr, flush=True)
    try:
        store, start_id = rendezvous.open_rank_store(rank, launched, timeout_seconds)
        store.set(rendezvous.HOST_KEY.format(rank), socket.gethostname())
        silent_limit = timeout_seconds if ranks > 1 else math.inf  # one rank sends no heartbeats
        return _wait_for_end(start_id, timeout_seconds, silent_limit)
    except dist.DistError:  # the store has ended, with the launcher or rank 0
        return EXIT_RANK_LOST


def _wait_for_end(start_id: str, timeout_seconds: float, silent_limit: float) -> int:
    """The exit code of the run; EXIT_STOPPED after a signal; EXIT_RANK_LOST if rank 0 is silent."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they stop the ranks that work, which takes a while
    store = rendezvous.connect_to_store(timeout_seconds)
    run, beats = dist.PrefixStore(start_id, store), dist.PrefixStore(f"watch/{start_id}", store)
    beat, silent_seconds = b"", 0.0  # of rank 0, as HeartbeatExchange sends it
    while not run.check([rendezvous.END_KEY]):
        newest = beats.get("0") if beats.check(["0"]) else b""
        silent_seconds = silent_seconds + rendezvous.SPARE_SECONDS if newest == beat else 0.0
        if received or silent_seconds > silent_limit:
            return EXIT_STOPPED if received else EXIT_RANK_LOST
        beat = newest
        time.sleep(rendezvous.SPARE_SECONDS)
    return int(run.get(rendezvous.END_KEY))
