"""Read batches ahead, in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeVar

from titanlite.threads import DeviceThread

T = TypeVar("T")
Slice = tuple[int, ...]  # first position, sequences, and what else `read` takes

_JOIN_SECONDS = 5  # a thread that is blocked in a read of a dead disk can only be abandoned


def prefetch(read: Callable[..., T], slices: Iterable[Slice], ahead: int = 2) -> Iterator[T]:
    """Yield `read(*slice)` for each slice, reading `ahead` batches, at least 1, in the background.

    An error of `read` is raised at its batch. The thread ends with the iterator in any case.
    """
    slices = iter(slices)
    reader = BackgroundReader(read)
    try:
        pending = deque(map(reader.submit, islice(slices, max(1, ahead))))
        while pending:
            batch = pending.popleft().result()
            pending.extend(map(reader.submit, islice(slices, 1)))
            yield batch
    finally:
        reader.close()


class BackgroundReader:
    """Calls `read(*slice)` for one request at a time, in one thread.

    In a daemon thread, not in a ThreadPoolExecutor: Python waits for the threads of an executor at
    exit, and a read that never returns must not keep the process alive.
    """

    def __init__(self, read: Callable[..., T]):
        self._read = read
        self._requests: SimpleQueue[tuple[Slice, Future] | None] = SimpleQueue()
        self._thread = DeviceThread(self._run, "prefetch")
        self._thread.start()

    def submit(self, slice: Slice) -> Future:
        future: Future = Future()
        self._requests.put((slice, future))
        return future

    def close(self) -> None:
        """Drop waiting requests and end the thread, waiting at most a few seconds for it."""
        with suppress(Empty):
            while True:  # not until empty(): the thread may take the last request in between
                self._requests.get_nowait()
        self._requests.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while request := self._requests.get():
            slice, future = request
            try:
                future.set_result(self._read(*slice))
            except BaseException as error:  # raised again by `Future.result`
                future.set_exception(error)
            del request, future  # so that this thread keeps no batch alive while it waits
