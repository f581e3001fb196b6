"""What has no timeout of its own ends all the same."""

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

from tests.conftest import ROOT
from tests.distributed.ranks import _forkserver
from tests.faults.launch import open_store
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import EXIT_RANK_LOST


def test_a_limit_warns_from_a_tenth_on_in_ever_longer_intervals_and_names_what_hangs(caplog):
    hangs = threading.Event()
    thread = threading.Thread(target=hangs.wait, daemon=True)
    thread.start()
    limit = TimeLimit("the save", 30, "a.key", thread.ident)
    found = [limit.check(1.0) for _ in range(31)]
    assert found[:30] == [""] * 30
    assert "the save has taken 31 s, and is in wait (" in found[30]
    assert "The limit is a.key = 30. Raise it if" in found[30]
    warned = [record.getMessage().split(",")[0] for record in caplog.records]
    assert warned == [f"the save has taken {seconds} s" for seconds in (3, 6, 12, 24)]
    hangs.set()


def keep_store(connection) -> None:
    store = open_store()
    connection.send(store.port)
    threading.Event().wait()


def meet_nobody(port: int, log: str) -> None:
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
    os.environ.update(
        RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    with join_process_group(
        torch.device("cpu"), CommConfig(init_timeout_seconds=4), DebugConfig(), Path()
    ):
        pass


def test_a_store_that_freezes_while_ranks_meet_does_not_keep_them(tmp_path):
    context, (here, there), said = _forkserver(), Pipe(), tmp_path / "said"
    keeper = context.Process(target=keep_store, args=(there,), daemon=True)
    keeper.start()
    port = here.recv()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.set("hello/1", "x")
    rank = context.Process(target=meet_nobody, args=(port, str(said)), daemon=True)
    rank.start()
    try:
        store.wait(["start/x"], timedelta(seconds=60))  # it meets; rank 1 never comes
        os.kill(keeper.pid, signal.SIGSTOP)
        rank.join(60)
        assert rank.exitcode == EXIT_RANK_LOST
        assert "rank 0: meeting the other ranks has taken 8 s, and is in" in said.read_text()
    finally:
        keeper.kill()
        rank.kill()


STUCK = """
import threading
from titanlite.distributed.time_limit import exit_process
threading.Thread(target=threading.Event().wait).start()  # Python would wait for it at the end
exit_process(75, seconds=0.5)
"""


def test_a_thread_that_hangs_does_not_keep_a_process_that_is_done():
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, timeout=60)
    assert done.returncode == 75
