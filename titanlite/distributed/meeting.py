"""Meeting the other ranks in the launcher's store, which may remember those of earlier starts.

torchrun keeps one store for all its restarts, and torch 2.11 to 2.15 look up each other's addresses
there under the same names every time: those of dead ranks are found
(https://github.com/pytorch/pytorch/issues/135712). The launcher's count of restarts is each
machine's own, so that the ranks have to find a name for their start by themselves.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PAUSE_SECONDS = 0.05  # between two looks


def launcher_keeps_store() -> bool:
    """Whether the store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_to_store(seconds: float) -> dist.Store:
    """A connection of our own to the store that the ranks meet at."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def agree_on_start(store: dist.Store, rank: int, ranks: int, seconds: float) -> str:
    """A word for this start, the same on all of its ranks and never used before.

    Each rank says hello by a word of its own, and rank 0 answers whatever hello it finds, a dead
    rank's too, until every rank has taken up its answer. Raises TimeoutError.
    """
    if rank:
        hello = uuid.uuid4().hex
        store.set(f"hello/{rank}", hello)
        store.wait([f"start/{hello}"], timedelta(seconds=seconds))
        start = store.get(f"start/{hello}").decode()
        store.set(f"{start}/{rank}", "")
        return start
    start, missing, end = uuid.uuid4().hex, set(range(1, ranks)), time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"{start}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"start/{store.get(f'hello/{other}').decode()}", start)
        if time.monotonic() > end:
            raise TimeoutError(f"ranks {sorted(missing)} have not come in {seconds:g} s")
        time.sleep(PAUSE_SECONDS if missing else 0)
    return start
