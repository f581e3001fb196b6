"""Start log: detects crash loops and reports previous failures.

`starts.jsonl` has a line for each start of a run, each roll-back, and each end, unless the process
was killed. Only the rank that holds the folder's lease writes the file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
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

STARTS_FILE = "starts.jsonl"
ORDERLY_EXIT_CODES = (EXIT_DONE, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_INTERRUPTED)
MAX_REASON_CHARACTERS = 500
LAST_TIME = 1e11  # seconds; datetime ends in the year 9999
FLAPPING_SECONDS = 24 * 3600.0  # in which the losses of one host are counted


@dataclass(frozen=True)
class StartRecord:
    """One start of a run, and how it ended if that was recorded; the keys of `starts.jsonl`."""

    time: float
    host: str
    pid: int
    ranks: int
    from_step: int  # of this run's checkpoint that was loaded; 0: none
    code: int | None = None  # exit code; None: no end was recorded
    step: int | None = None  # at the end
    reason: str = ""
    launch: str = ""  # the same for all restarts of one torchrun
    hosts: Sequence[str] = ()  # of the ranks; (): not known

    @property
    def crashed(self) -> bool:
        return self.code not in ORDERLY_EXIT_CODES

    def lost_hosts(self, later: Sequence[str]) -> set[str]:
        """The hosts that the next start, on the hosts `later`, does without.

        Empty if it has none of these hosts: then a scheduler has moved the run.
        """
        lost = set(self.hosts) - set(later)
        return lost if len(lost) < len(set(self.hosts)) else set()

    def __str__(self) -> str:
        when = f"{datetime.fromtimestamp(self.time).astimezone():%Y-%m-%d %H:%M:%S %z}"
        start = f"{when} on {self.host}, {self.ranks} ranks, from step {self.from_step}"
        if self.code is None:
            return f"{start}: was killed, or its machine failed"
        step = "" if self.step is None else f" at step {self.step}"
        return f"{start}: exit code {self.code}{step}" + (self.reason and f": {self.reason}")


class StartLog:
    """The starts of the run in `folder`, and how they ended."""

    def __init__(self, folder: Path):
        self.path = folder / STARTS_FILE
        self._running = False

    def read(self) -> list[StartRecord]:
        """The starts so far, oldest first."""
        return read_starts(_read_if_exists(self.path))

    def check_crash_loop(self, from_step: int, limit: int, hosts: Sequence[str] = ()) -> None:
        """Raise CheckpointError if the last `limit` starts from this step crashed; 0: no limit.

        `hosts`: of this start. A crash that one of several hosts did not survive is not counted.
        """
        crashes = consecutive_crashes(self.read(), from_step, hosts)
        if not limit or len(crashes) < limit:
            return
        evidence = [str(crash) for crash in crashes[-limit:]]
        raise CheckpointError(
            f"{self.path}: the last {len(crashes)} starts crashed without a checkpoint newer than"
            f" step {from_step}:\n    " + "\n    ".join(evidence) + "\n ",
            fix="Fix the cause, then start once with --job.max_crashes 0, or delete"
            f" {STARTS_FILE}.",
        )

    def stopped_in_this_launch(self, hosts: Sequence[str]) -> bool:
        """Whether this start is a restart by torchrun, though the run was asked to stop and did.

        torchrun restarts ranks after every exit code but 0. It also stops and restarts all ranks
        when a host joins or leaves: then `hosts`, those of this start, are others than before.
        """
        starts = self.read()
        if not starts or not int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0) or 0):
            return False
        last = starts[-1]
        same = last.launch == _launch_id() and set(last.hosts) == set(hosts)
        return last.code == EXIT_STOPPED and same

    def record_start(self, ranks: int, from_step: int, hosts: Sequence[str] = ()) -> None:
        """Append a start, which is a crash until `record_end`; raises CheckpointError."""
        fields = {"ranks": ranks, "from_step": from_step, "launch": _launch_id(), "hosts": hosts}
        try:
            self._append("start", host=socket.gethostname(), pid=os.getpid(), **fields)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}.") from error
        self._running = True

    def record_rollback(self, step: int, to_step: int, reason: str) -> None:
        """Append a roll-back from `step` to the checkpoint of `to_step`."""
        self._append_or_warn("rollback", reason, step=step, to_step=to_step)

    def record_end(self, code: int, step: int, reason: str = "") -> None:
        """Append the end of the start that was recorded; only its first end counts."""
        if not self._running:  # this start was refused: do not record an end of the previous one
            return
        self._running = False
        self._append_or_warn("end", reason, code=code, step=step)

    def _append_or_warn(self, event: str, reason: str, **fields: int) -> None:
        """Append an event; an error of the disk must not hide why the run ends or rolls back."""
        reason = " ".join(reason.split())[:MAX_REASON_CHARACTERS]
        try:
            self._append(event, **fields, reason=reason)
        except OSError as error:
            logger.warning("%s: %s", self.path, error.strerror or error)

    def _append(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.time(), **fields}).encode() + b"\n"
        with self.path.open("a+b") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line  # after a line that a crash cut off
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def _launch_id() -> str:
    """Identifies one torchrun, with all its restarts; empty under plain python."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run_id} by process {os.getppid()} of {socket.gethostname()}" if run_id else ""


def _read_if_exists(path: Path) -> bytes:
    """The content of a file; b"" if there is none. Raises CheckpointError if it is unreadable."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error


# --- pure functions ------------------------------------------------------------------------------


def read_starts(content: bytes) -> list[StartRecord]:
    """The starts in a start log, oldest first; skips lines that no run wrote or a crash cut off."""
    starts: list[StartRecord] = []
    for line in content.split(b"\n"):
        try:
            entry = parse_json(line)
            event = entry.pop("event")
            if event == "start":
                starts.append(_checked(StartRecord(**entry)))
            elif event == "end" and starts:
                del entry["time"]
                starts[-1] = _checked(replace(starts[-1], **entry))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return starts


def _checked(start: StartRecord) -> StartRecord:
    """The same; raises ValueError for a field of another type."""
    numbers = [start.time, start.ranks, start.from_step, start.code or 0, start.step or 0]
    texts = [start.host, start.reason, start.launch, *start.hosts]
    if not (
        0 <= start.time < LAST_TIME
        and all(isinstance(number, int | float) for number in numbers)
        and all(isinstance(text, str) for text in texts)
    ):
        raise ValueError("not a start of a run")
    return start


def consecutive_crashes(
    starts: Sequence[StartRecord], from_step: int, hosts: Sequence[str] = ()
) -> list[StartRecord]:
    """The crashes since the last orderly end or start from another step, oldest first.

    Without those after which a host was lost. `hosts`: of the start after the last one.
    """
    crashes: list[StartRecord] = []
    for start, later in with_later_hosts(starts, hosts):
        if not start.crashed or start.from_step != from_step:
            crashes = []
        elif not start.lost_hosts(later):
            crashes.append(start)
    return crashes


def count_losses(starts: Sequence[StartRecord], hosts: Sequence[str], now: float) -> Counter[str]:
    """How often each host was lost in the last `FLAPPING_SECONDS`, before a start on `hosts`."""
    recent = [pair for pair in with_later_hosts(starts, hosts) if pair[0].crashed]
    recent = [(start, later) for start, later in recent if start.time > now - FLAPPING_SECONDS]
    return Counter(host for start, later in recent for host in start.lost_hosts(later))


def with_later_hosts(
    starts: Sequence[StartRecord], hosts: Sequence[str]
) -> Iterator[tuple[StartRecord, Sequence[str]]]:
    """Each start with the hosts of the next one; those of the last are `hosts`."""
    return zip(starts, [*(start.hosts for start in starts[1:]), hosts], strict=False)
