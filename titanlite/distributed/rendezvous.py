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
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from titanlite.errors import RendezvousError

POLL_SECONDS = 0.05
MAX_LISTED_RANKS = 8
CHECK_MACHINES = (
    "Check that the launcher runs on every machine with the same address and number of machines,"
    " and that the machines can reach each other. Raise comm.init_timeout_seconds if one starts"
    " later."
)


def launched_rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) set by torchrun; (0, 1) under plain python."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def launcher_hosts_store() -> bool:
    """Whether the launcher hosts the store, so that it outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_address() -> str:
    """The host and port of the ranks' store, for messages."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def open_rank_store(rank: int, world_size: int, seconds: float) -> tuple[dist.Store, str]:
    """The store for `init_process_group`, and the id of this start ("" if there is one rank).

    Raises RendezvousError if the store cannot be reached, or ranks are missing.
    """
    if world_size == 1:
        return dist.HashStore(), ""
    try:
        if launcher_hosts_store():
            store = connect_to_store(seconds)
        else:
            store = open_store(rank, seconds)
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


def agree_on_start_id(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """Return an id of this start that is the same on all ranks and was never used before.

    Each other rank writes a random nonce. Rank 0 answers every nonce it finds, even one of a dead
    rank, with the start id, until every rank has confirmed that id. Raises RendezvousError.
    """
    if rank:
        return _ask_for_start_id(store, rank, world_size, seconds)
    start_id, missing = uuid.uuid4().hex, set(range(1, world_size))
    deadline = time.monotonic() + seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"{start_id}/{other}"]):
                missing.remove(other)
            elif store.check([f"hello/{other}"]):
                store.set(f"start/{store.get(f'hello/{other}').decode()}", start_id)
        if missing and time.monotonic() > deadline:
            raise RendezvousError(
                f"Only {world_size - len(missing)} of {world_size} ranks joined at"
                f" {store_address()} within comm.init_timeout_seconds = {seconds:g}. Missing:"
                f" {_list_ranks(sorted(missing))}.",
                fix=CHECK_MACHINES,
            )
        time.sleep(POLL_SECONDS if missing else 0)
    return start_id


def _ask_for_start_id(store: dist.Store, rank: int, world_size: int, seconds: float) -> str:
    """The start id from rank 0, for another rank; raises RendezvousError."""
    nonce = uuid.uuid4().hex
    store.set(f"hello/{rank}", nonce)
    try:
        store.wait([f"start/{nonce}"], timedelta(seconds=seconds))
    except dist.DistStoreError as error:  # a timeout; a broken connection is a DistNetworkError
        raise RendezvousError(
            f"Rank {rank} of {world_size} joined at {store_address()}, but rank 0 did not answer"
            f" within comm.init_timeout_seconds = {seconds:g}.",
            fix=CHECK_MACHINES,
        ) from error
    start_id = store.get(f"start/{nonce}").decode()
    store.set(f"{start_id}/{rank}", "")
    return start_id


def _list_ranks(ranks: list[int]) -> str:
    """`ranks 1, 2 and 3 more`, from the first few ranks."""
    more = len(ranks) - MAX_LISTED_RANKS
    listed = ", ".join(map(str, ranks[:MAX_LISTED_RANKS]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}{f' and {more} more' if more > 0 else ''}"
