"""The metrics.jsonl sink, and the folder that it writes to."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from pathlib import Path
from typing import Any

from titanlite.files import parse_json, write_file_atomically
from titanlite.log import logger, pluralize

METRICS_FILE = "metrics.jsonl"
REPLACED_FILE = "metrics.replaced.jsonl"  # records of steps repeated after a resume or roll-back
ROLLBACK_EVENT = "rolled_back"  # with its `number`, counted from 1 over the whole run
# Events of measurements: numbers and tables of them, which TensorBoard and W&B get too.
MEASUREMENTS = (
    "layer_norms", "source_losses", "noise_scale", "expert_load", "mtp_losses",
    "preferences", "rollout",  # of titanlite_post
)  # fmt: skip
TAIL_BYTES = 1 << 20  # of the file, in which the record of the last step is looked for
UNSAVED_FOLDER = "unsaved"  # subfolder for a run without checkpoints, see metrics_folder


class JsonlSink:
    """One JSON object per line, written to the operating system immediately."""

    def __init__(self, path: Path, completed_steps: int, rollbacks: int = 0):
        """`rollbacks`: how often the run was rolled back before it came to `completed_steps`."""
        self.path = path
        self._continued_from = completed_steps, rollbacks
        self.file = self._open()

    def step(self, record: dict[str, Any]) -> None:
        if self.file.closed:  # the last `roll_back` failed, for example on a full disk
            self.file = self._open()
        text = json.dumps(_finite_or_null(record), allow_nan=False, ensure_ascii=False) + "\n"
        line, size = text.encode(), self.file.seek(0, os.SEEK_END)
        if self.file.write(line) < len(line):  # the disk is full: remove the incomplete line
            self.file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)

    event = step

    def roll_back(self, step: int, rollbacks: int) -> None:
        self.close()
        self._continued_from = step, rollbacks
        self.file = self._open()

    def _open(self) -> io.FileIO:
        drop_later_records(self.path, *self._continued_from)
        return self.path.open("ab", buffering=0)

    def has_event(self, step: int, name: str) -> bool:
        with self.path.open("rb") as lines:
            records = (parse_json(line) for line in lines if name.encode() in line)
            return any((r.get("event"), r["step"]) == (name, step) for r in records)

    def sync(self) -> None:
        if not self.file.closed:
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def metrics_folder(folder: Path, saves: bool) -> Path:
    """The folder for the records of a run: `folder` (job.dump_folder) or its subfolder `unsaved`.

    A run that saves no checkpoints must not replace the records of one that does: where `folder`
    has such records, a run without checkpoints writes to the subfolder.
    """
    if saves or not _has_saved_checkpoints(folder / METRICS_FILE):
        return folder
    logger.warning(
        "%s has the records of a run with checkpoints; this run saves no checkpoints, so its"
        " records are written to %s",
        folder,
        folder / UNSAVED_FOLDER,
    )
    return folder / UNSAVED_FOLDER


def read_last_step(path: Path) -> tuple[int, float] | None:
    """The last step that the file has a record of, and its time; None: it has none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            try:
                record = parse_json(line)
                if "event" not in record:
                    return int(record["step"]), float(record["time"])
            except (ValueError, KeyError, TypeError):  # cut off by a crash, or by the seek
                continue
    return None


def drop_later_records(path: Path, step: int, rollbacks: int) -> None:
    """Move records of steps after `step`, and incomplete lines, to `metrics.replaced.jsonl`.

    The run repeats these steps, and would write a second record of each. The events of its first
    `rollbacks` roll-backs stay, even those of steps after `step`; those of later roll-backs move.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    is_kept = [_is_complete_up_to(line, step, rollbacks) for line in lines]
    kept = [line for line, keep in zip(lines, is_kept, strict=True) if keep]
    if kept == lines:
        return
    replaced = path.with_name(REPLACED_FILE)
    # Appended first: after a crash in between, a line is in both files, and none is lost.
    with replaced.open("ab") as file:
        moved = [line for line, keep in zip(lines, is_kept, strict=True) if not keep]
        file.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
        file.flush()
        os.fsync(file.fileno())
    write_file_atomically(path, b"".join(kept))
    count = pluralize(len(moved), "line")
    logger.info("%s: %s, after step %d or incomplete, moved to %s", path, count, step, replaced)


def _is_complete_up_to(line: bytes, step: int, rollbacks: int) -> bool:
    """Whether the line is complete, and a record of the run up to `step`."""
    try:
        record = parse_json(line)
        if record.get("event") == ROLLBACK_EVENT:
            return line.endswith(b"\n") and record["number"] <= rollbacks
        return line.endswith(b"\n") and record["step"] <= step
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def _has_saved_checkpoints(path: Path) -> bool:
    """Whether a metrics.jsonl belongs to a run that has saved a checkpoint."""
    try:
        with path.open("rb") as lines:
            return any(b'"checkpoint_saved"' in line for line in lines)
    except FileNotFoundError:
        return False


def _finite_or_null(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
