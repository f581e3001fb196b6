"""Limits on work that has no timeout of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path

import torch
import torch.distributed as dist

from conftest import HANG_SECONDS, ROOT
from tests.distributed.ranks import _forkserver
from tests.faults.launch import open_store
from titanlite.distributed import time_limit
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import EXIT_RANK_LOST


def test_a_time_limit_warns_at_doubling_intervals_and_reports_the_place_that_hangs(caplog):
    hangs = threading.Event()
    thread = threading.Thread(target=hangs.wait, daemon=True)
    thread.start()
    limit = TimeLimit("the save", 30, "a.key", thread.ident)
    reports = [limit.check(1.0) for _ in range(31)]
    assert reports[:30] == [""] * 30
    assert "the save has taken 31 s, and is in wait (" in reports[30]
    assert "The limit is a.key = 30. Raise it if" in reports[30]
    warned = [record.getMessage().split(",")[0] for record in caplog.records]
    assert warned == [f"the save has taken {seconds} s" for seconds in (3, 6, 12, 24)]
    hangs.set()


def test_a_rank_that_waits_for_others_reports_later_than_the_rank_that_hangs(monkeypatch):
    """Also for a limit of a few watchdog checks; else the wrong rank is named."""
    waits = TimeLimit("the save", 3, "a.key")
    monkeypatch.setattr(time_limit, "locate_thread", lambda thread: ("gather", True))
    assert [waits.check(1.0) for _ in range(6)] == [""] * 6
    assert "the save has taken 7 s" in waits.check(1.0)


def host_store(connection) -> None:
    store = open_store()
    connection.send(store.port)
    threading.Event().wait()


def join_without_rank_1(port: int, log: str) -> None:
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    comm = CommConfig(init_timeout_seconds=4)
    with join_process_group(torch.device("cpu"), comm, DebugConfig(), Path(), ErrorReport()):
        pass


def test_a_store_that_freezes_during_rendezvous_does_not_block_ranks_forever(tmp_path):
    context, (here, there), log = _forkserver(), Pipe(), tmp_path / "log"
    host = context.Process(target=host_store, args=(there,), daemon=True)
    host.start()
    port = here.recv()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("hello/1", "x")
    rank = context.Process(target=join_without_rank_1, args=(port, str(log)), daemon=True)
    rank.start()
    try:
        store.wait(["start/x"], timedelta(seconds=60))  # rank 0 answers; rank 1 never joins
        os.kill(host.pid, signal.SIGSTOP)
        rank.join(60)
        assert rank.exitcode == EXIT_RANK_LOST
        assert "rank 0: joining the process group has taken 8 s, and is in" in log.read_text()
    finally:
        host.kill()
        rank.kill()


STUCK = """
import threading
from titanlite.distributed.time_limit import exit_process
threading.Thread(target=threading.Event().wait).start()  # Python would wait for it at exit
exit_process(75, seconds=0.5)
"""


def test_a_thread_that_hangs_does_not_block_the_exit_of_a_process():
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, timeout=HANG_SECONDS)
    assert done.returncode == 75
