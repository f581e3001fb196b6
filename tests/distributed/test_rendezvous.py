"""Restarted ranks find each other, and not the dead ranks of an earlier start."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from tests.faults.launch import LaunchedRun
from titanlite.distributed import error_report
from titanlite.distributed.rendezvous import agree_on_start_id, announce_ranks, open_rank_store
from titanlite.errors import EXIT_RANK_LOST, RendezvousError


def agree(store: dist.TCPStore, ranks: int, alive: int) -> list[str | None]:
    """The start id that each rank agrees on, if only the first `alive` ranks join."""
    start_ids: list[str | None] = [None] * ranks

    def join(rank: int) -> None:
        own = dist.TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        with suppress(RendezvousError):
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


@pytest.mark.parametrize("hosts_store", ["True", "False"], ids=["torchrun", "mpirun"])
def test_missing_ranks_are_reported_without_a_traceback(hosts_store, run_toml, tmp_path):
    argv = (
        *("--job.config_file", str(run_toml), "--training.global_batch_size", "12"),
        *("--comm.init_timeout_seconds", "2"),
    )
    prepare = partial(expect_three_ranks, hosts_store, find_free_port())
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [EXIT_RANK_LOST] * 2, run.output
    assert "Traceback" not in run.output
    assert "titanlite: Only 2 of 3 ranks joined at 127.0.0.1:" in run.output
    assert "comm.init_timeout_seconds = 2. Missing: rank 2. Check that the" in run.output
    if hosts_store == "True":  # else the store ends with rank 0
        assert "rank 1: titanlite: Rank 1 of 3 joined at 127.0.0.1:" in run.output


def expect_three_ranks(hosts_store: str, port: int) -> None:
    """Two ranks of three; if the launcher hosts no store, rank 0 does, on another port."""
    error_report.RANK_0_SECONDS = 1
    os.environ.update(WORLD_SIZE="3", TORCHELASTIC_USE_AGENT_STORE=hosts_store)
    if hosts_store == "False":
        os.environ["MASTER_PORT"] = str(port)


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_store_that_cannot_be_reached_is_reported(monkeypatch):
    port = find_free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{port}, or did not reach"):
        open_rank_store(1, 2, 1.0)


def test_each_machine_but_that_of_rank_0_says_where_the_log_is(monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    for rank in (0, 7, 8, 9):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 8))
        announce_ranks(rank)
    assert capsys.readouterr().err == "ranks 8-15 run; the log is at node-a\n"
