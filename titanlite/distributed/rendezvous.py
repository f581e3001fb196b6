"""Meeting the other ranks in the launcher's store, which may remember those of earlier starts.

torchrun keeps one store for all its restarts, and torch 2.11 to 2.15 look up each other's addresses
there under the same names every time: those of dead ranks are found
(https://github.com/pytorch/pytorch/issues/135712). The launcher's count of restarts is each
machine's own, so that the ranks have to find a name for their start by themselves.

The store has no authentication. Whoever reaches its port can end a run: by a false name or address
the ranks miss each other, and give up after `comm.init_timeout_seconds`. Nothing that is read here
is executed. On one machine nothing has to listen on other interfaces than loopback.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

PAUSE_SECONDS = 0.05  # between two looks


def launcher_hosts_store() -> bool:
    """Whether the store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_to_store(seconds: float) -> dist.Store:
    """A connection of our own to the store that the ranks meet at."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_store(rank: int, seconds: float) -> dist.Store:
    """The store of ranks whose launcher keeps none: rank 0 opens it, the others connect.

    At a loopback address it listens there only; torch itself listens on every interface.
    """
    if rank:
        return connect_to_store(seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=seconds)}
    if is_loopback(address):
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        options["master_listen_fd"] = listener.detach()
    return dist.TCPStore(address, port, **options)


def is_loopback(address: str) -> bool:
    """Whether an address, by name or number, is of this machine alone."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def bind_gloo_to_loopback(ranks: int) -> None:
    """Let gloo listen on the loopback interface where all ranks are on one machine.

    What the user has set stays. NCCL is left as it is: NCCL_SOCKET_IFNAME=lo does the same there.
    """
    if ranks > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def agree_on_start_id(store: dist.Store, rank: int, ranks: int, seconds: float) -> str:
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
