"""Read batches in a background thread, with a time limit on waiting for each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from titanlite.errors import DataError
from titanlite.log import logger
from titanlite.threads import DeviceThread

_WARN_AFTER = 0.1  # fraction of the time limit
_JOIN_SECONDS = 5  # a thread that is blocked in a read of a dead disk can only be abandoned


class BackgroundReader:
    """Calls `read(position, sequences)` for one request at a time, in one thread.

    In a daemon thread, not in a ThreadPoolExecutor: Python waits for the threads of an executor at
    exit, and a read that never returns must not keep the process alive.
    """

    def __init__(self, read: Callable[[int, int], Any], name: str, timeout_seconds: float | None):
        """`timeout_seconds`: the longest wait for one result; None: no limit."""
        self._read, self._timeout = read, timeout_seconds
        self._requests: SimpleQueue[tuple[int, int, Future] | None] = SimpleQueue()
        self._thread = DeviceThread(self._run, name)
        self._thread.start()

    def submit(self, position: int, sequences: int) -> Future:
        """Request a batch; pass the result to `wait`."""
        future: Future = Future()
        self._requests.put((position, sequences, future))
        return future

    def wait(self, future: Future, description: str) -> Any:
        """Return the batch, or raise the error of reading it; DataError after the time limit.

        `description` names the data that is read, for the warning and the error.
        """
        if self._timeout is None:
            return future.result()
        warn_after = self._timeout * _WARN_AFTER
        wait([future], warn_after)
        if not future.done():
            logger.warning(
                "%s: not read after %g s; the run ends after %g s (data.read_timeout_seconds)",
                description,
                warn_after,
                self._timeout,
            )
            wait([future], self._timeout - warn_after)
        if not future.done():
            raise DataError(
                f"{description}: was not read within {self._timeout:g} s; the disk or file server"
                " is slow or does not respond.",
                fix="Check the disk or file server, or increase data.read_timeout_seconds.",
            )
        return future.result()

    def close(self) -> None:
        """Drop waiting requests and end the thread, waiting at most a few seconds for it."""
        with suppress(Empty):
            while True:  # not until empty(): the thread may take the last request in between
                self._requests.get_nowait()
        self._requests.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while request := self._requests.get():
            position, sequences, future = request
            try:
                future.set_result(self._read(position, sequences))
            except BaseException as error:  # raised again in `wait`
                future.set_exception(error)
            del request, future  # so that this thread keeps no batch alive while it waits
