"""Ranks that are started again meet each other, and not those that are dead."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from titanlite.distributed.rendezvous import agree_on_start_id


def meet(store: dist.TCPStore, ranks: int, alive: int) -> list[str | None]:
    """The start that each of the ranks agrees on, of which only `alive` have come."""
    starts: list[str | None] = [None] * ranks

    def one(rank: int) -> None:
        own = dist.TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        try:
            starts[rank] = agree_on_start_id(own, rank, ranks, 5.0 if alive == ranks else 0.5)
        except (TimeoutError, dist.DistError):
            pass

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(alive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return starts


def test_every_start_has_a_word_of_its_own_whatever_the_store_remembers():
    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    words = set()
    for alive in (3, 3, 2, 3):  # the third start lost a rank before it could meet the others
        starts = meet(store, 3, alive)
        if alive == 3:
            assert len(set(starts)) == 1 and starts[0]
            words.add(starts[0])
        else:
            assert starts[0] is None, "rank 0 went on without a rank"
    assert len(words) == 3
