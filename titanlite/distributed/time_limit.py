"""Time limits on work that may hang, as on a disk that no longer answers.

What a thread waits for in the kernel cannot be interrupted. So a limit warns long before, with the
place in the code; once it has passed, whoever checks it ends the process, and a restart goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from titanlite.errors import EXIT_RANK_LOST
from titanlite.log import logger

OURS = f"{Path(__file__).parents[1]}{os.sep}"
WARN_SECONDS = 60.0  # after which a limit warns, or after a tenth of it where that is less
LEAVE_SECONDS = 60.0  # for closing connections and threads at the end of a process
WAITS = 1.2  # of a limit: who waits for other ranks lets the one they wait for speak first


@dataclass
class TimeLimit:
    """How long one piece of work, of one thread, may take."""

    what: str
    seconds: float
    key: str  # the setting to raise
    thread: int = field(default_factory=threading.get_ident)
    passed: float = 0.0  # seconds in which this process was not stopped itself
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self._warn_at = min(WARN_SECONDS, self.seconds / 10)

    def check(self, passed: float) -> str:
        """Count `passed` more seconds; returns what hangs, in words, once the limit has passed."""
        self.passed += passed
        if self.passed < min(self._warn_at, self.seconds):
            return ""
        place, waits = stack_location(self.thread)
        words = f"{self.what} has taken {self.passed:.0f} s, and is in {place}"
        if self.passed > self.seconds * (WAITS if waits else 1):
            return (
                f"{words}. The limit is {self.key} = {self.seconds:g}. Raise it if this only needs"
                " longer; the same command resumes from the newest checkpoint."
            )
        if self.passed >= self._warn_at and not waits:
            self._warn_at = 2 * self.passed
            logger.warning("%s; the run ends after %g s (%s)", words, self.seconds, self.key)
        return ""


def stack_location(thread: int) -> tuple[str, bool]:
    """Where in our code a thread is, and whether it waits there for other ranks.

    No source is read: it may be on the disk that hangs.
    """
    frames = list(_outwards(sys._current_frames().get(thread)))
    waits = any(frame.f_code.co_filename.endswith("distributed_c10d.py") for frame in frames)
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(OURS)] or frames
    if not ours:
        return "a thread that has ended", waits
    file = ours[0].f_code.co_filename.removeprefix(OURS)
    return f"{ours[0].f_code.co_name} ({file}, line {ours[0].f_lineno})", waits


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def exit_after(seconds: float, what: str) -> Iterator[None]:
    """End the process when the block takes longer, whatever it waits for.

    For what comes before and after the watchdog, and may ignore its own timeout.
    """
    timer = _end_later(seconds, what, EXIT_RANK_LOST)
    try:
        yield
    finally:
        timer.cancel()


def exit_process(code: int, seconds: float = LEAVE_SECONDS) -> NoReturn:
    """Exit with a code, after `seconds` also from a thread that Python would wait for."""
    _end_later(seconds, "ending", code)
    sys.exit(code)


def _end_later(seconds: float, what: str, code: int) -> threading.Timer:
    caller = threading.get_ident()

    def end() -> None:
        words = f"titanlite: {what} has taken {seconds:g} s, and is in {stack_location(caller)[0]}."
        print(words, file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
