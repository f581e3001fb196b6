"""A save that a thread writes while training continues."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import UserError
from titanlite.storage import StorageFolder
from titanlite.threads import DeviceThread


class SaveInProgress:
    """A save with its time limit; its result, valid once `done` is set: seconds, problem, error."""

    def __init__(self, step: int, folder: StorageFolder, started: float, timeout_seconds: float):
        self.step, self.folder, self.started = step, folder, started
        self.limit: TimeLimit | None = None  # None until the writing thread runs
        self.seconds = self.blocked_seconds = 0.0
        self.problem = ""  # the message of an error that every rank raised
        self.error: Exception | None = None  # of this rank only; others may still be saving
        self.done = threading.Event()
        self._name = f"Rank {dist.get_rank()}: the save of step {step}"
        self._timeout_seconds = timeout_seconds

    def start(self, write: Callable[[], None], blocking: bool) -> None:
        """Call `write`, in another thread unless `blocking`."""
        if blocking:
            self._run(write)
        else:
            DeviceThread(self._run, "save", (write,)).start()
        self.blocked_seconds = time.monotonic() - self.started

    def _run(self, write: Callable[[], None]) -> None:
        self.limit = TimeLimit(self._name, self._timeout_seconds, "checkpoint.timeout_seconds")
        try:
            write()
        except Exception as error:  # Ctrl-C ends the run; a failed save does not
            if isinstance(error, UserError) and error.on_all_ranks:
                self.problem = str(error)
            else:
                self.error = error
        finally:
            self.seconds = time.monotonic() - self.started
            self.done.set()
