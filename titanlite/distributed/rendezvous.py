"""Rendezvous through the launcher's store, which may still have the keys of earlier starts.

torchrun uses one store for all its restarts, and torch 2.11 to 2.15 exchange addresses there under
the same keys every time, so ranks find the addresses of dead ranks
(https://github.com/pytorch/pytorch/issues/135712). The launcher counts restarts per machine, so
that count cannot identify a start: the ranks agree on an id themselves.

The store has no authentication. A process that reaches its port can end a run: with a forged id or
address the ranks do not find each other, and give up after `comm.init_timeout_seconds`. Nothing
that is read here is executed. On one machine, ranks listen on the loopback interface only.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import sys
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from titanlite.distributed.rank_tree import children_of, subtree_of

POLL_SECONDS = 0.05
FANOUT_TO_JOIN = 32  # ranks that a rank waits for: 3 levels for 16,384 ranks


def launcher_hosts_store() -> bool:
    """Whether the launcher hosts the store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_to_store(seconds: float) -> dist.Store:
    """Open a new connection to the store of the ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def open_store(rank: int, seconds: float) -> dist.Store:
    """Host a store on rank 0 and connect the other ranks; for launchers that host none.

    If its address is a loopback address, the store listens only there; torch itself would listen on
    every interface.
    """
    if rank:
        return connect_to_store(seconds)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listen_fd = None
    if is_loopback(address):
        listen_fd = socket.create_server(("127.0.0.1", port), backlog=1024).detach()
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listen_fd,
    )


def is_loopback(address: str) -> bool:
    """Whether a host name or IP address is a loopback address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def bind_gloo_to_loopback(world_size: int) -> None:
    """Make gloo listen on the loopback interface if all ranks are on one machine.

    A GLOO_SOCKET_IFNAME that the user has set is kept. NCCL is not changed here; the user can set
    NCCL_SOCKET_IFNAME=lo.
    """
    if world_size > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def connect_gloo_on_demand() -> None:
    """Let gloo connect two ranks when they first exchange data, instead of all ranks at once.

    Otherwise each group needs a socket for every rank in it, and its creation exchanges a number of
    addresses that grows with the square of the number of ranks. torch reads the variable whenever
    it creates a group (2.11 to 2.15). Only gloo's TCP transport on Linux can do it; the others
    refuse (torch's GlooDeviceFactory.cpp). A setting of the user stays.
    """
    if sys.platform == "linux" and os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP":
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files, which sockets count against, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a sandbox may forbid it, and macOS has a lower maximum
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def agree_on_start_id(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """Return an id of this start that is the same on all ranks and was never used before.

    Each rank but rank 0 writes a random nonce. Its parent in the tree of ranks answers every nonce
    it finds, even one of a dead rank, with the start id, until the rank has confirmed that id; it
    does so when its own children have. Raises TimeoutError.
    """
    deadline = time.monotonic() + seconds
    start_id = uuid.uuid4().hex
    if rank:
        nonce = uuid.uuid4().hex
        store.set(f"hello/{rank}", nonce)
        store.wait([f"start/{nonce}"], timedelta(seconds=seconds))
        start_id = store.get(f"start/{nonce}").decode()
    missing = set(children_of(rank, world_size, FANOUT_TO_JOIN))
    while missing:
        for child in sorted(missing):
            if store.check([f"{start_id}/{child}"]):
                missing.remove(child)
            elif store.check([f"hello/{child}"]):
                store.set(f"start/{store.get(f'hello/{child}').decode()}", start_id)
        if time.monotonic() > deadline:
            late = _find_missing_ranks(store, start_id, rank, world_size)
            raise TimeoutError(f"ranks {late} did not join within {seconds:g} s")
        time.sleep(POLL_SECONDS if missing else 0)
    if rank:
        store.set(f"{start_id}/{rank}", "")
    return start_id


def _find_missing_ranks(store: dist.Store, start_id: str, rank: int, world_size: int) -> list[int]:
    """The ranks below `rank` that have not confirmed the id, although their children have."""
    below = subtree_of(rank, world_size, FANOUT_TO_JOIN)[1:]
    missing = {other for other in below if not store.check([f"{start_id}/{other}"])}
    return sorted(
        other
        for other in missing
        if missing.isdisjoint(children_of(other, world_size, FANOUT_TO_JOIN))
    )
