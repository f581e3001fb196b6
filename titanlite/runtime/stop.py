"""Stop requests: a signal to any one rank, or the time limit of the job."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from titanlite.errors import EXIT_INTERRUPTED
from titanlite.threads import DeviceThread

ENDING = (signal.SIGINT, signal.SIGTERM)  # after these, torchrun kills the ranks in the end
SIGNALS = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
TIME_LIMIT_REASON = 1 << 10  # larger than any signal number
SECOND_CTRL_C_SECONDS = 1.0  # a signal within this time is the launcher's copy of the first
ABORT_SECONDS = 2.0  # to record how the run ends; not longer, because the disk may hang
LIMIT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # of torchrun, which passes it on to the ranks
DEFAULT_LIMIT_SECONDS = 30.0  # of torchrun


def launcher_limit() -> float | None:
    """Seconds after which torchrun kills the ranks once it got a signal; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        return float(os.environ[LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return DEFAULT_LIMIT_SECONDS


@dataclass
class StopRequest:
    """Whether this rank was asked to stop; all ranks decide together when to do so."""

    deadline: float | None = None  # by time.monotonic()
    limit_seconds: float | None = field(default_factory=launcher_limit)
    received: int = field(default=0, init=False)  # the number of the signal
    limit_begins: float = field(default=math.inf, init=False)  # by time.monotonic()

    def install_handlers(self, on_abort: Callable[[], None], rank: int = 0) -> None:
        """Treat signals as requests to save and stop; without this call they end the process.

        A second Ctrl-C calls `on_abort` and ends the process. A thread handles the signals, so that
        this happens immediately, whatever the main thread is waiting for.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # gets each signal's number
        # Signals of forked children must not be written into this pipe.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        DeviceThread(self._read_signals, "signals", (read_end, on_abort, rank)).start()

    def reason(self, seconds_needed: float) -> int:
        """Why to stop now: a signal number or TIME_LIMIT_REASON; 0 if there is no reason.

        `seconds_needed`: the time to finish the steps in progress and to save.
        """
        if self.deadline is not None and time.monotonic() + seconds_needed >= self.deadline:
            return TIME_LIMIT_REASON
        return self.received

    @property
    def seconds_left(self) -> float:
        """Time until torchrun kills this rank; inf unless SIGINT or SIGTERM was received."""
        if self.limit_seconds is None:
            return math.inf
        return self.limit_begins + self.limit_seconds - time.monotonic()

    def _describe(self, number: int) -> str:
        """What happens after a signal, in one line."""
        is_ctrl_c = number == signal.SIGINT
        name = "Ctrl-C" if is_ctrl_c else signal.Signals(number).name
        line = f"titanlite: {name}: saving after this step"
        if self.limit_seconds is not None and number in ENDING:
            line += (
                ", or the state before it if its micro-batches take too long; torchrun kills the"
                f" ranks {self.limit_seconds:g} s after the signal ({LIMIT_VARIABLE})"
            )
        return line + ("; a second Ctrl-C ends without saving" if is_ctrl_c else "")

    def _read_signals(self, read_end: int, on_abort: Callable[[], None], rank: int) -> None:
        first_ctrl_c: float | None = None  # by time.monotonic()
        while True:
            (number,) = os.read(read_end, 1)
            if first_ctrl_c is None:
                if number in SIGNALS:
                    is_shown = rank == 0 and (not self.received or number == signal.SIGINT)
                    self.received = number
                    if number in ENDING:
                        self.limit_begins = min(self.limit_begins, time.monotonic())
                    if is_shown:
                        with suppress(OSError):  # whoever read stderr may be gone
                            print(self._describe(number), file=sys.stderr, flush=True)
                if number == signal.SIGINT:
                    first_ctrl_c = time.monotonic()
            elif (
                # torchrun forwards a second Ctrl-C as SIGTERM (torch 2.13).
                number in ENDING and time.monotonic() - first_ctrl_c >= SECOND_CTRL_C_SECONDS
            ):
                _abort(on_abort)


def _abort(on_abort: Callable[[], None]) -> None:
    """End this process, whatever its main thread is doing."""
    recording = DeviceThread(on_abort, "abort")
    recording.start()
    recording.join(ABORT_SECONDS)
    os._exit(EXIT_INTERRUPTED)


def stop_reason_name(reason: int) -> str:
    """The name of a stop reason in log lines and events: "SIGTERM", "time_limit"."""
    return "time_limit" if reason == TIME_LIMIT_REASON else signal.Signals(reason).name
