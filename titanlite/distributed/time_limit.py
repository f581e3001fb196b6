"""Time limits on work that may hang, for example on a disk that no longer answers.

A thread that waits in the kernel cannot be interrupted. So a limit warns early, with the place in
the code; when it is exceeded, the thread that checks it ends the process, and a restart resumes.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from titanlite.errors import EXIT_RANK_LOST
from titanlite.log import logger
from titanlite.threads import DeviceThread

WAITING_FILES = ("distributed_c10d.py", "rank_tree.py")  # whose functions wait for other ranks
PACKAGE_PREFIX = f"{Path(__file__).parents[1]}{os.sep}"
WARN_SECONDS = 60.0  # first warning; a tenth of the limit if that is earlier
LEAVE_SECONDS = 60.0  # for closing connections and threads at the end of a process
# A rank that waits for other ranks gets more time, so that the rank that hangs reports first: a
# fraction of the limit, but not less than the minimum, because a watchdog checks once a second.
WAITING_FRACTION, MIN_WAITING_SECONDS = 0.2, 3.0


@dataclass
class TimeLimit:
    """How long one piece of work of one thread may take."""

    work: str
    seconds: float
    key: str  # the setting to raise
    thread: int = field(default_factory=threading.get_ident)
    elapsed_seconds: float = 0.0  # excludes time in which this process was suspended
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._warn_at = min(WARN_SECONDS, self.seconds / 10)

    def check(self, passed: float) -> str:
        """Add `passed` seconds; return an error text if the limit is exceeded, else "".

        Logs a warning earlier, and again each time that the elapsed time has doubled.
        """
        self.elapsed_seconds += passed
        if self.elapsed_seconds < min(self._warn_at, self.seconds):
            return ""
        location, waits = locate_thread(self.thread)
        state = f"{self.work} has taken {self.elapsed_seconds:.0f} s, and is in {location}"
        extra = max(WAITING_FRACTION * self.seconds, MIN_WAITING_SECONDS) if waits else 0.0
        if self.elapsed_seconds > self.seconds + extra:
            return (
                f"{state}. The limit is {self.key} = {self.seconds:g}. Raise it if this work needs"
                " longer; the same command resumes from the newest checkpoint, if there is one."
            )
        if self.elapsed_seconds >= self._warn_at and not waits:
            self._warn_at = 2 * self.elapsed_seconds
            logger.warning("%s; the run ends after %g s (%s)", state, self.seconds, self.key)
        return ""


def locate_thread(thread: int) -> tuple[str, bool]:
    """Innermost titanlite function of a thread, and whether it waits there for other ranks.

    Reads no source file, because it may be on the disk that hangs.
    """
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return "a thread that has ended", False
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    waits = any(frame.f_code.co_filename.endswith(WAITING_FILES) for frame in frames)
    in_package = (f for f in frames if f.f_code.co_filename.startswith(PACKAGE_PREFIX))
    frame = next(in_package, innermost)
    file = frame.f_code.co_filename.removeprefix(PACKAGE_PREFIX)
    return f"{frame.f_code.co_name} ({file}, line {frame.f_lineno})", waits


@contextmanager
def exit_after(seconds: float, work: str, code: int = EXIT_RANK_LOST) -> Iterator[None]:
    """End the process with `code` if the block takes longer, even if it waits in the kernel.

    For work that the watchdog does not monitor and whose own timeout may not take effect.
    """
    cancelled = _start_exit_timer(seconds, work, code)
    try:
        yield
    finally:
        cancelled.set()


def exit_process(code: int, seconds: float = LEAVE_SECONDS) -> NoReturn:
    """Exit with `code`; after `seconds` even if threads or exit handlers are still running."""
    _start_exit_timer(seconds, "process exit", code)
    sys.exit(code)


def _start_exit_timer(seconds: float, work: str, code: int) -> threading.Event:
    """Start a thread that ends the process after `seconds`, unless the event is set."""
    caller, cancelled = threading.get_ident(), threading.Event()

    def run() -> None:
        if not cancelled.wait(seconds):
            text = f"{work} has taken {seconds:g} s, and is in {locate_thread(caller)[0]}"
            with suppress(OSError):  # whoever read stderr may be gone
                print(f"titanlite: {text}.", file=sys.stderr, flush=True)
            os._exit(code)

    DeviceThread(run, "exit timer").start()
    return cancelled
