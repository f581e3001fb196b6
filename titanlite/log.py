"""One logger; which rank speaks, and whether in colour, is told to it."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("titanlite")

_GREY, _YELLOW, _RED, _RESET = "\033[2m", "\033[33m", "\033[31m", "\033[0m"


class _Format(logging.Formatter):
    def __init__(self, rank: int, colour: bool):
        super().__init__(datefmt="%H:%M:%S")
        self.who = f"[{rank}] " if rank else ""
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        head, text = f"{self.formatTime(record, self.datefmt)} {self.who}", record.getMessage()
        if not self.colour:
            return f"{head}{level}{text}"
        paint = _RED if record.levelno >= logging.ERROR else _YELLOW if level else ""
        return f"{_GREY}{head}{_RESET}{paint}{level}{text}{_RESET if paint else ''}"


def configure_log(rank: int = 0, colour: bool | None = None) -> None:
    """Let rank 0 speak from INFO up and the others, by number, from WARNING up, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format(rank, sys.stderr.isatty() if colour is None else colour))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
