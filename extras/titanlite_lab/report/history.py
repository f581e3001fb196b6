"""What a run recorded: its steps, events and starts, and where its time went."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError, DataError
from titanlite.metrics import METRICS_FILE
from titanlite.metrics.jsonl import REPLACED_FILE
from titanlite.runtime.start_log import LAST_TIME, STARTS_FILE, StartRecord, read_starts
from titanlite.settings import read_toml
from titanlite_lab.run_metrics import Record, read_metrics

FIRST_STEP_FACTOR = 1.5  # times the median: a longer first step was compiled or warmed up


@dataclass(frozen=True)
class RunHistory:
    """One run, as read from its folder."""

    folder: Path
    steps: list[Record]  # step lines, in the order of steps
    events: list[Record]
    abandoned: list[list[Record]]  # step lines that were repeated later, by attempt
    starts: list[StartRecord]
    config: dict[str, Any]  # "section.key" -> value
    name_parts: int = 1  # last parts of the folder's path that are the name

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-self.name_parts :])

    def column(self, key: str) -> list[float]:
        """The values of a key at every step line; NaN where it is null or missing."""
        return [_as_float(record.get(key)) for record in self.steps]

    def events_named(self, *names: str) -> list[Record]:
        """The events with these names, in the order in which they were recorded."""
        return [event for event in self.events if event["event"] in names]

    @property
    def validation_sets(self) -> dict[str, list[Record]]:
        """The validation events of each set."""
        sets: dict[str, list[Record]] = {}
        for event in self.events_named("validation"):
            if event["loss"] is not None:  # inf or NaN
                sets.setdefault(str(event["name"]), []).append(event)
        return sets

    @cached_property
    def goodput(self) -> Goodput:
        """Where the wall time of the run went."""
        return _measure_goodput(self)


@dataclass(frozen=True)
class Goodput:
    """Wall time of a run in seconds, by what it was used for; the sum is the total."""

    training: float  # steps that no restart or roll-back repeated
    data: float  # waiting for batches
    saving: float  # training blocked by a checkpoint
    startup: float  # from a start to its first step, compilation included
    repeated: float  # steps after a checkpoint that a restart or a roll-back repeated
    stopped: float  # between the last record of a start and the next start
    other: float  # validation, logging, and what was not recorded

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.parts())

    @property
    def fraction(self) -> float:
        """Fraction of the wall time that trained the final weights."""
        return self.training / self.total if self.total else math.nan

    def parts(self) -> list[tuple[str, float]]:
        """(use, seconds) of all uses."""
        return [(name, getattr(self, name)) for name in self.__dataclass_fields__]


def read_runs(paths: Sequence[Path]) -> list[RunHistory]:
    """Read runs, with distinct names: runs/a/out and runs/b/out are named a/out and b/out."""
    runs, folders = [read_run(path) for path in paths], {path.resolve() for path in paths}
    parts, longest = 1, max(len(folder.parts) for folder in folders)
    while parts < longest and len({folder.parts[-parts:] for folder in folders}) < len(folders):
        parts += 1
    return [dataclasses.replace(run, name_parts=parts) for run in runs]


def read_run(path: Path) -> RunHistory:
    """Read the run of a job.dump_folder; raises DataError for a folder that no run wrote."""
    steps, events = read_metrics(path / METRICS_FILE)
    if not steps:
        raise DataError(f"{path}: has no step.", fix="Give the folder of a run that took a step.")
    replaced = path / REPLACED_FILE
    # A resume also moves incomplete lines there, so it may have some in the middle.
    abandoned = read_metrics(replaced, skip_incomplete=True)[0] if replaced.exists() else []
    starts_file = path / STARTS_FILE
    starts = read_starts(starts_file.read_bytes()) if starts_file.exists() else []
    try:
        for record in (*steps, *abandoned, *events):
            _check_metrics_record(record)
        steps.sort(key=lambda record: record["step"])
        return RunHistory(path, steps, events, _attempts(abandoned), starts, _read_config(path))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: is not the folder of a run ({reason}).") from None


_REQUIRED = ("step", "tokens", "time", "step_seconds", "data_seconds")  # of a step line
_REQUIRED_OF_EVENT = {"validation": ("name", "loss"), "rolled_back": ("from_step",)}


def _check_metrics_record(record: Record) -> None:
    """Raise ValueError or KeyError for a record that lacks what every run writes."""
    for key in _REQUIRED if "event" not in record else ("step", "time"):
        if record[key] is None:
            raise ValueError(f"{key} is null")
    for key in _REQUIRED_OF_EVENT.get(record.get("event", ""), ()):
        record[key]
    if not 0 <= record["time"] < LAST_TIME:
        raise ValueError(f"time {record['time']!r}")
    json.dumps(record, ensure_ascii=False).encode()  # a lone surrogate cannot be written to a page


def _read_config(path: Path) -> dict[str, Any]:
    """The effective configuration, flat; empty if there is none or it is unreadable."""
    try:
        return dict(_flatten(read_toml(str(path / "config.toml"))))
    except ConfigError:
        return {}


def _flatten(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _attempts(records: Iterable[Record]) -> list[list[Record]]:
    """Split records where the step goes back: there, a new attempt begins."""
    attempts: list[list[Record]] = []
    for record in records:
        if not attempts or record["step"] <= attempts[-1][-1]["step"]:
            attempts.append([])
        attempts[-1].append(record)
    return attempts


def _as_float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# --- goodput -------------------------------------------------------------------------------------

_SAVES = ("checkpoint_saved", "checkpoint_failed", "memory_checkpoint_saved")


def _measure_goodput(run: RunHistory) -> Goodput:
    kept = list(_with_step_counts(run.steps, run))
    taken_again = [pair for attempt in run.abandoned for pair in _with_step_counts(attempt, run)]
    median = finite_median(record["step_seconds"] for record, _ in kept)
    startup, excess = _measure_starts(run, [*kept, *taken_again], median)
    training = sum(count * record["step_seconds"] for record, count in kept) - excess
    data = sum(count * record["data_seconds"] for record, count in kept)
    repeated = sum(
        count * (record["step_seconds"] + record["data_seconds"]) for record, count in taken_again
    )
    saving = sum(_as_float(event.get("blocked_seconds", 0)) for event in run.events_named(*_SAVES))
    times = sorted(
        record["time"] for records in (run.steps, run.events, *run.abandoned) for record in records
    )
    stopped = sum(_gaps(times, [start.time for start in run.starts[1:]]))
    total = times[-1] - min([times[0], *(start.time for start in run.starts)])
    other = total - (training + data + saving + startup + repeated + stopped)
    return Goodput(training, data, saving, startup, repeated, stopped, max(0.0, other))


def _with_step_counts(records: list[Record], run: RunHistory) -> Iterator[tuple[Record, int]]:
    """(record, number of steps since the record before it, the last start or roll-back)."""
    rolled_back_to = (event["step"] for event in run.events_named("rolled_back"))
    started_at = [0, *(start.from_step for start in run.starts), *rolled_back_to]
    previous = 0
    for record in records:
        before = [step for step in (previous, *started_at) if step < record["step"]]
        yield record, record["step"] - max(before, default=0)
        previous = record["step"]


def _measure_starts(
    run: RunHistory, records: list[tuple[Record, int]], median: float
) -> tuple[float, float]:
    """(start-up seconds, the part of them that is inside first steps).

    Start-up is the time from each start to its first step. A first step that took much longer than
    the median step was compiled or warmed up; what exceeds the median is start-up, too.
    """
    startup = excess = 0.0
    ends = [start.time for start in run.starts[1:]] + [math.inf]
    kept = {id(record) for record in run.steps}
    for start, end in zip(run.starts, ends, strict=False):
        own = [pair for pair in records if start.time <= pair[0]["time"] < end]
        if not own:
            continue
        record, count = min(own, key=lambda pair: pair[0]["time"])
        took = count * (record["step_seconds"] + record["data_seconds"])
        startup += max(0.0, record["time"] - took - start.time)
        if record["step_seconds"] > FIRST_STEP_FACTOR * median and id(record) in kept:
            excess += count * (record["step_seconds"] - median)
    return startup + excess, excess


def _gaps(times: list[float], starts: list[float]) -> Iterator[float]:
    """Seconds between each start and the last record or start before it."""
    for number, start in enumerate(starts):
        before = sorted([time for time in times if time <= start] + starts[:number])
        if before:
            yield start - before[-1]


def finite_median(values: Iterable[float]) -> float:
    """The median of the finite values; NaN if there is none."""
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else math.nan
