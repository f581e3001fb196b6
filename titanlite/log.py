"""The logger, configured with the rank and whether to use colour; plurals for messages."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event

from titanlite.threads import DeviceThread

logger = logging.getLogger("titanlite")

_GREY, _YELLOW, _RED, _RESET = "\033[2m", "\033[33m", "\033[31m", "\033[0m"


class RankFormatter(logging.Formatter):
    """`12:34:56 [rank] level: message`; rank 0 and level INFO are omitted."""

    def __init__(self, rank: int, colour: bool):
        super().__init__(datefmt="%H:%M:%S")
        self._rank = f"[{rank}] " if rank else ""
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        head, text = f"{self.formatTime(record, self.datefmt)} {self._rank}", record.getMessage()
        if not self._colour:
            return f"{head}{level}{text}"
        colour = _RED if record.levelno >= logging.ERROR else _YELLOW if level else ""
        return f"{_GREY}{head}{_RESET}{colour}{level}{text}{_RESET if colour else ''}"


def pluralize(count: int, noun: str) -> str:
    """A count and its noun, for messages: "1 shard", "2,000 shards"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


@contextmanager
def log_every(seconds: float, describe: Callable[[], str]) -> Iterator[None]:
    """Log `describe()` after each interval until the block ends."""
    ended = Event()

    def log_until_ended() -> None:
        while not ended.wait(seconds):
            logger.info("%s", describe())

    DeviceThread(log_until_ended, "log progress").start()
    try:
        yield
    finally:
        ended.set()


def log_waiting(what: str) -> AbstractContextManager[None]:
    """Log every 10 s how long `what` takes, until the block ends."""
    began = time.monotonic()
    return log_every(10.0, lambda: f"{what}: {time.monotonic() - began:.0f} s so far")


def configure_log(rank: int = 0, colour: bool | None = None) -> None:
    """Log to stderr: rank 0 from INFO, others from WARNING. `colour=None`: on a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RankFormatter(rank, sys.stderr.isatty() if colour is None else colour))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
