"""The ledger of a run's starts: a job that only dies is stopped, and told what it died of.

`starts.jsonl` has a line for each start and one for each end that was in order; a process that was
killed leaves none. Only one rank writes it, and only while it holds the lease of the folder.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from titanlite.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    CheckpointError,
)
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.metrics import METRICS_FILE

STARTS_FILE = "starts.jsonl"
NOT_DEATHS = (EXIT_DONE, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class StartRecord:
    """One start of a run, and how it ended as far as anybody could write it down."""

    time: float
    host: str
    pid: int
    ranks: int
    from_step: int  # of the checkpoint it went on from; 0: none
    code: int | None = None  # None: it did not get to say
    step: int | None = None
    reason: str = ""
    launch: str = ""  # what torchrun's restarts of one launch share

    @property
    def died(self) -> bool:
        return self.code not in NOT_DEATHS

    def __str__(self) -> str:
        when = f"{datetime.fromtimestamp(self.time).astimezone():%Y-%m-%d %H:%M:%S %z}"
        start = f"{when} on {self.host}, {self.ranks} ranks, from step {self.from_step}"
        if self.code is None:
            return f"{start}: was killed, or its machine went away"
        step = "" if self.step is None else f" at step {self.step}"
        return f"{start}: exit code {self.code}{step}" + (self.reason and f": {self.reason}")


class StartLog:
    """The starts of the run in `folder`, and how they ended."""

    def __init__(self, folder: Path):
        self.path = folder / STARTS_FILE
        self._running = False

    def check_crash_loop(self, from_step: int, limit: int) -> None:
        """Raise CheckpointError if the last `limit` starts from there died; 0 is no limit."""
        deaths = consecutive_crashes(read_starts(_read(self.path)), from_step)
        if not limit or len(deaths) < limit:
            return
        evidence = [str(death) for death in deaths[-limit:]]
        reached = last_step(_read(self.path.with_name(METRICS_FILE)))
        if reached > from_step:
            evidence.append(f"{METRICS_FILE} tells of steps up to {reached}")
        raise CheckpointError(
            f"{self.path}: the last {len(deaths)} starts died without a checkpoint newer than"
            f" step {from_step}:\n    " + "\n    ".join(evidence) + "\n ",
            fix="Mend the cause, then start once with --job.max_crashes 0, or delete this file.",
        )

    def stopped_in_this_launch(self) -> bool:
        """Whether torchrun restarts a run that was asked to stop, and did: it cannot tell."""
        lives, restarts = (
            read_starts(_read(self.path)),
            os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        )
        if not lives or not int(restarts or 0):
            return False
        return lives[-1].code == EXIT_STOPPED and lives[-1].launch == _this_launch()

    def record_start(self, ranks: int, from_step: int) -> None:
        """Write down that the run starts; it counts as a death until `end` says otherwise."""
        host, pid = socket.gethostname(), os.getpid()
        try:
            about = {"ranks": ranks, "from_step": from_step, "launch": _this_launch()}
            self._append("start", host=host, pid=pid, **about)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}.") from error
        self._running = True

    def record_end(self, code: int, step: int, reason: str = "") -> None:
        """Write down how the run ends, if it started; only its first end counts."""
        if not self._running:  # a refused start must not look like the end of the one before
            return
        self._running = False
        try:
            self._append("end", code=code, step=step, reason=" ".join(reason.split())[:500])
        except OSError as error:  # it must not hide why the run ends
            logger.warning("%s: %s", self.path, error.strerror or error)

    def _append(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n"
        with self.path.open("a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # below what a crash has left half-written
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _this_launch() -> str:
    """What torchrun and its restarts share, and two torchruns do not; empty under plain python."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run_id} by process {os.getppid()} of {socket.gethostname()}" if run_id else ""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error


# --- pure ----------------------------------------------------------------------------------------


def read_starts(text: bytes) -> list[StartRecord]:
    """The lives that a ledger tells of, oldest first; lines torn by a crash are passed over."""
    lives: list[StartRecord] = []
    for line in text.split(b"\n"):
        try:
            entry = parse_json(line)
            event = entry.pop("event")
            if event == "start":
                lives.append(StartRecord(**entry))
            elif event == "end" and lives:
                del entry["time"]
                lives[-1] = replace(lives[-1], **entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return lives


def consecutive_crashes(lives: Iterable[StartRecord], from_step: int) -> list[StartRecord]:
    """The deaths since anything else happened, oldest first, if all started from `from_step`.

    A start from another step and an end in order break the row.
    """
    row: list[StartRecord] = []
    for life in lives:
        if not life.died or life.from_step != from_step:
            row = []
        else:
            row.append(life)
    return row


def last_step(journal: bytes) -> int:
    """The last step that a metrics.jsonl tells of; 0 where it tells of none."""
    for line in reversed(journal.splitlines()):
        try:
            entry = parse_json(line)
            if "event" not in entry:
                return int(entry["step"])
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    return 0
