"""Reading in the background, with a limit on how long anyone waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from queue import SimpleQueue
from threading import Thread
from typing import Any

from titanlite.errors import DataError
from titanlite.log import logger

_WARN_AFTER = 0.1  # of the limit
_JOIN_SECONDS = 5  # a thread that a dead disk holds cannot be ended, only left behind


class BackgroundReader:
    """Reads (position, rows) after (position, rows) in one thread.

    The thread is a daemon, and not one of an executor, which Python would wait for at its exit:
    a read that never returns must not keep the process alive.
    """

    def __init__(self, read: Callable[[int, int], Any], name: str, timeout_seconds: float | None):
        """`timeout_seconds`: the longest wait for one result; None: no limit."""
        self._read, self._timeout = read, timeout_seconds
        self._requests: SimpleQueue[tuple[int, int, Future] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, position: int, rows: int) -> Future:
        """Ask for a batch; `wait` gets it."""
        future: Future = Future()
        self._requests.put((position, rows, future))
        return future

    def wait(self, future: Future, what: str) -> Any:
        """The batch, or the error of reading it; raises DataError after the time limit.

        `what` is read, for the warning and the error.
        """
        if self._timeout is None:
            return future.result()
        early = self._timeout * _WARN_AFTER
        try:
            return future.result(early)
        except TimeoutError:
            if future.done():  # an error of the read itself
                raise
        logger.warning(
            "%s: not read for %.0f s; the run ends after %.0f s", what, early, self._timeout
        )
        try:
            return future.result(self._timeout - early)
        except TimeoutError:
            if future.done():
                raise
        raise DataError(
            f"{what}: could not be read within {self._timeout:g} s; the disk or file server does"
            " not answer.",
            fix="Check it; data.read_timeout_seconds allows more time.",
        )

    def close(self) -> None:
        """End the thread; wait for it only a few seconds."""
        while not self._requests.empty():
            self._requests.get()
        self._requests.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while request := self._requests.get():
            position, rows, future = request
            try:
                future.set_result(self._read(position, rows))
            except BaseException as error:  # it is raised where the batch is waited for
                future.set_exception(error)
            del request, future  # a batch must not stay alive until the next one
