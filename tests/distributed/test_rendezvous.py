"""Restarted ranks find each other, and not the dead ranks of an earlier start."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from titanlite.distributed.rendezvous import agree_on_start_id


def agree(store: dist.TCPStore, ranks: int, alive: int) -> list[str | None]:
    """The start id that each rank agrees on, if only the first `alive` ranks join."""
    start_ids: list[str | None] = [None] * ranks

    def join(rank: int) -> None:
        own = dist.TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        with suppress(TimeoutError, dist.DistError):
            start_ids[rank] = agree_on_start_id(own, rank, ranks, 5.0 if alive == ranks else 0.5)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(alive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return start_ids


def test_every_start_gets_a_new_id_from_a_store_with_old_keys():
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    unique = set()
    for alive in (3, 3, 2, 3):  # the third start lost a rank before it joined
        start_ids = agree(store, 3, alive)
        if alive == 3:
            assert len(set(start_ids)) == 1 and start_ids[0]
            unique.add(start_ids[0])
        else:
            assert start_ids[0] is None, "rank 0 continued without a rank"
    assert len(unique) == 3
