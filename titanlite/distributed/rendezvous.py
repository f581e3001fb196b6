"""Rendezvous through the launcher's store, which may still have the keys of earlier starts.

torchrun uses one store for all its restarts, and torch 2.11 to 2.15 exchange addresses there under
the same keys every time, so ranks find the addresses of dead ranks
(https://github.com/pytorch/pytorch/issues/135712). The launcher counts restarts per machine, so
that count cannot identify a start: the ranks agree on an id themselves.

The store has no authentication. A process that reaches its port can end a run: with a forged id or
address the ranks do not find each other, and give up after `comm.init_timeout_seconds`. Nothing
that is read here is executed. On one machine, gloo listens on the loopback interface only.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from titanlite.distributed.rank_tree import children_of, subtree_of
from titanlite.errors import RendezvousError

POLL_SECONDS = 0.05
FANOUT_TO_JOIN = 32  # ranks that a rank waits for: 3 levels for 16,384 ranks
MAX_LISTED_RANKS = 8
SPARES_VARIABLE = "TITANLITE_SPARES"  # launched ranks beyond WORLD_SIZE: see titanlite/elastic
END_KEY = "exit code"  # of the run; spares look for it
HOST_KEY = "host of rank {}"  # of a spare
SPARE_SECONDS = 1.0  # between two looks
CHECK_MACHINES = (
    "Check that the launcher runs on every machine with the same address and number of machines,"
    " and that the machines can reach each other. Raise comm.init_timeout_seconds if a machine"
    " starts later."
)


def launched_rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) set by torchrun; (0, 1) under plain python."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def announce_ranks(rank: int) -> None:
    """On each machine but rank 0's, print one line: its ranks, and where the log is."""
    if rank and os.environ.get("LOCAL_RANK") == "0":
        last = rank + int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1
        where = os.environ.get("MASTER_ADDR")
        print(f"ranks {rank}-{last} run; the log is at {where}", file=sys.stderr, flush=True)


def store_address() -> str:
    """The host and port of the ranks' store, for messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def open_rank_store(rank: int, world_size: int, seconds: float) -> tuple[dist.Store, str]:
    """The store, and the id of this start ("" if there is one rank); raises RendezvousError."""
    if world_size == 1:
        return dist.HashStore(), ""
    try:
        # torchrun hosts the store, so that it outlives the ranks; other launchers host none.
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = connect_to_store(seconds) if rank or is_hosted else host_store(seconds)
        start_id = agree_on_start_id(store, rank, world_size, seconds)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).partition("\n")[0]
        raise RendezvousError(
            f"Rank {rank} lost the store at {store_address()}, or did not reach it within"
            f" {seconds:g} s: {reason}",
            fix=CHECK_MACHINES,
        ) from error
    return dist.PrefixStore(start_id, store), start_id


def connect_to_store(seconds: float) -> dist.Store:
    """Open a new connection to the store of the ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def host_store(seconds: float) -> dist.Store:
    """Host the store of the ranks in this process.

    It listens only on the loopback interface if MASTER_ADDR is one; torch itself on every one.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    fd, timeout = None, timedelta(seconds=seconds)
    if is_loopback(address):
        fd = socket.create_server(("127.0.0.1", port), backlog=1024).detach()
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd
    )


def is_loopback(address: str) -> bool:
    """Whether a host name or IP address is a loopback address."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def bind_gloo_to_loopback(world_size: int) -> None:
    """Make gloo listen on the loopback interface if all ranks are on one machine.

    A GLOO_SOCKET_IFNAME of the user stays. NCCL is not changed; NCCL_SOCKET_IFNAME is the user's.
    """
    if world_size > int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        return
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names.pop())


def connect_gloo_on_demand() -> None:
    """Let gloo connect two ranks when they first exchange data, instead of all ranks at once.

    Otherwise each group needs a socket for every rank in it, and its creation exchanges a number of
    addresses that grows with the square of the number of ranks. torch reads TORCH_GLOO_LAZY_INIT
    whenever it creates a group (2.11 to 2.15). Only gloo's TCP transport on Linux supports this;
    the others refuse (torch's GlooDeviceFactory.cpp). A setting of the user stays.
    """
    if sys.platform == "linux" and os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP":
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


@contextmanager
def explaining_failed_connections(
    rank: int, world_size: int, others: str = "other ranks"
) -> Iterator[None]:
    """Raise RendezvousError if this rank cannot connect to the others.

    gloo connects two ranks when they first exchange data, so the group may exist before that.
    """
    try:
        yield
    except RuntimeError as error:
        if world_size == 1:
            raise
        reason = str(error).partition("\n")[0]
        raise RendezvousError(
            f"Rank {rank} of {world_size} reached the store at {store_address()}, but could not"
            f" connect to the {others}: {reason}",
            fix="Check whether another rank failed before, that the machines can reach each other"
            " on all ports, and that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set, name the"
            " right interfaces.",
        ) from error


def agree_on_start_id(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """Return an id of this start that is the same on all ranks and was never used before.

    Each rank but rank 0 writes a random nonce. Its parent in the tree of ranks answers every nonce
    it finds, even one of a dead rank, with the start id, until the rank has confirmed that id. A
    rank confirms the id when all of its children have confirmed it. No rank returns before all
    ranks have joined. Raises RendezvousError.
    """
    deadline = time.monotonic() + seconds
    start_id = uuid.uuid4().hex
    if rank:
        nonce = uuid.uuid4().hex
        store.set(f"hello/{rank}", nonce)
        _wait_for_key(store, f"start/{nonce}", rank, world_size, seconds)
        start_id = store.get(f"start/{nonce}").decode()
    waiting_for = children_of(rank, world_size, FANOUT_TO_JOIN)
    while waiting_for := [c for c in waiting_for if not store.check([f"{start_id}/{c}"])]:
        for child in waiting_for:
            if store.check([f"hello/{child}"]):
                store.set(f"start/{store.get(f'hello/{child}').decode()}", start_id)
        if time.monotonic() > deadline:
            raise _missing_ranks(store, start_id, rank, world_size, seconds)
        time.sleep(POLL_SECONDS)
    store.set(f"{start_id}/{rank}", "")
    if rank:
        _wait_for_key(store, f"{start_id}/0", rank, world_size, seconds)  # rank 0 confirms last
    return start_id


def _wait_for_key(store: dist.Store, key: str, rank: int, world_size: int, seconds: float) -> None:
    """Wait for a key that another rank sets; raises RendezvousError."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except dist.DistStoreError as error:  # a timeout; a broken connection is a DistNetworkError
        raise RendezvousError(
            f"Rank {rank} of {world_size} joined at {store_address()}, but other ranks did not"
            f" within comm.init_timeout_seconds = {seconds:g}; rank 0 names them, unless it is"
            " missing itself.",
            fix=CHECK_MACHINES,
        ) from error


def _missing_ranks(
    store: dist.Store, start_id: str, rank: int, world_size: int, seconds: float
) -> RendezvousError:
    """The error that names the missing ranks, of those below `rank` in the tree."""
    below = subtree_of(rank, world_size, FANOUT_TO_JOIN)[1:]
    unconfirmed = sorted(other for other in below if not store.check([f"{start_id}/{other}"]))
    # A rank also stays unconfirmed if its parent or a child is missing. After a restart every rank
    # has a hello key, possibly of an earlier start: then all unconfirmed ranks are named.
    absent = [other for other in unconfirmed if not store.check([f"hello/{other}"])]
    missing = absent or unconfirmed
    ranks = f"{world_size} ranks" if rank == 0 else f"{len(below)} ranks below rank {rank}"
    total = world_size if rank == 0 else len(below)
    listed, more = ", ".join(map(str, missing[:MAX_LISTED_RANKS])), len(missing) - MAX_LISTED_RANKS
    return RendezvousError(
        f"Only {total - len(missing)} of {ranks} joined at {store_address()} within"
        f" comm.init_timeout_seconds = {seconds:g}. Missing: rank{'s' if len(missing) > 1 else ''}"
        f" {listed}{f' and {more} more' if more > 0 else ''}.",
        fix=CHECK_MACHINES,
    )
