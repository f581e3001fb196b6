"""Being asked to stop: by a signal to any one rank, or by the clock."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from titanlite.errors import EXIT_INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TIME_IS_UP = 1 << 10  # beside the numbers of signals
AGAIN_SECONDS = 1.0  # sooner, a second Ctrl-C is the first one, passed on by a launcher as well
LEAVE_SECONDS = 2.0  # for writing down how the run ends, to a disk that may be what hangs


@dataclass
class StopRequest:
    """Whether this rank was asked to stop; what a run does about it is decided by all together."""

    deadline: float | None = None  # by time.monotonic()
    received: int = field(default=0, init=False)  # the signal that came

    def install_handlers(self, leave: Callable[[], None], rank: int = 0) -> None:
        """From now on a signal is a request to save and leave, no longer the end.

        A second Ctrl-C calls `leave` and ends the process. Signals are handled in a thread, so that
        this is done at once, whatever the main thread is waiting for.
        """
        here, there = os.pipe()
        os.set_blocking(there, False)
        signal.set_wakeup_fd(there, warn_on_full_buffer=False)  # gets the number of each signal
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # theirs are not ours
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        arguments = (here, leave, rank)
        threading.Thread(target=self._take, args=arguments, name="signals", daemon=True).start()

    def reason(self, seconds_needed: float) -> int:
        """Nonzero if it is time to stop, where leaving in order takes so many seconds."""
        if self.deadline is not None and time.monotonic() + seconds_needed >= self.deadline:
            return TIME_IS_UP
        return self.received

    def _take(self, pipe: int, leave: Callable[[], None], rank: int) -> None:
        interrupted: float | None = None  # when the first Ctrl-C came, by time.monotonic()
        while True:
            (number,) = os.read(pipe, 1)
            if interrupted is None:
                self.received = number if number in SIGNALS else self.received
                if number == signal.SIGINT:
                    interrupted = time.monotonic()
                    if rank == 0:
                        print(INTERRUPTED, file=sys.stderr, flush=True)
            # torchrun passes a second Ctrl-C on as SIGTERM (2.13).
            elif number in (signal.SIGINT, signal.SIGTERM):
                if time.monotonic() - interrupted >= AGAIN_SECONDS:
                    _end(leave)


INTERRUPTED = "titanlite: Ctrl-C: saving after this step; a second Ctrl-C ends without saving"


def _end(leave: Callable[[], None]) -> None:
    """End this process, whatever its main thread is doing."""
    last = threading.Thread(target=leave, daemon=True)
    last.start()
    last.join(LEAVE_SECONDS)
    os._exit(EXIT_INTERRUPTED)


def stop_reason_name(reason: int) -> str:
    """Why a run stopped, for people."""
    return "time_limit" if reason == TIME_IS_UP else signal.Signals(reason).name
