"""Run a process in the background of another one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from titanlite.errors import EXIT_INTERRUPTED
from titanlite.threads import DeviceThread


def run_in_background() -> None:
    """Run at the lowest priority, and end when the process that started this one ends.

    That process holds the other end of stdin, so reading it ends when the process does. If memory
    runs out, Linux ends this process first (proc(5), oom_score_adj).
    """
    os.nice(19)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    DeviceThread(_end_with_parent, "parent").start()


def _end_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin.read, whose lock Python waits for when it exits
        pass
    os._exit(EXIT_INTERRUPTED)
