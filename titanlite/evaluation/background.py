"""Run a process in the background of another one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from titanlite.errors import EXIT_INTERRUPTED
from titanlite.threads import DeviceThread


def run_in_background() -> None:
    """Give way to the process that started this one, and end with it.

    That process holds the other end of stdin, so reading it ends when the process does. If memory
    runs out, Linux ends this process first (proc(5), oom_score_adj).
    """
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    DeviceThread(_end_with_parent, "parent").start()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # sys.stdin has a lock, which Python wants at its exit
        pass
    os._exit(EXIT_INTERRUPTED)
