"""Which positions a step of a run has consumed, from what the run recorded.

The position is a pure function of the batch sizes and of the windows that roll-backs skip. The
sizes follow from the counts of samples in metrics.jsonl and in checkpoints, and in between from the
schedule in config.toml. So a step is found exactly, whatever layouts the run had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from titanlite.checkpoint import checkpoint_folder, list_steps, read_checkpoint_manifest
from titanlite.data import PositionWindow, next_start
from titanlite.errors import CheckpointError, DataError
from titanlite.guard.rollback import RollbackHistory, RollbackTry, Trouble
from titanlite.job import JobConfig
from titanlite.metrics import METRICS_FILE
from titanlite.training.batch_schedule import build_batch_schedule
from titanlite_lab.run_metrics import Record, read_metrics

DATA_PROPERTIES = ("debug.seed", "training.seq_len", "data.tokenizer", "data.bos", "data.sources")


@dataclass(frozen=True)
class ConsumedBatch:
    """The positions that one step consumed."""

    step: int
    position: int  # the first one
    samples: int


@dataclass
class RunProgress:
    """What a run recorded of its progress, by step."""

    folder: Path
    config: JobConfig
    samples: dict[int, int] = field(default_factory=lambda: {0: 0})  # consumed, in total
    positions: dict[int, int] = field(default_factory=lambda: {0: 0})  # the next one
    rollbacks: list[tuple[int, RollbackTry]] = field(default_factory=list)
    # (step of the checkpoint that the run went back to, what it did), in order
    properties: dict[int, dict[str, Any]] = field(default_factory=dict)  # of checkpoints
    lanes: dict[int, Any] = field(default_factory=dict)  # of checkpoints, see `SampleStream`

    def batch_of(self, step: int) -> ConsumedBatch:
        """What `step` consumed; raises DataError if it is not known exactly."""
        last = max(self.samples)
        if not 1 <= step <= last:
            taken = f"has taken {last} steps" if last else "has taken no step"
            raise DataError(f"{self.folder}: {taken}; there is no step {step}.")
        usable = self.positions.keys() & self.samples.keys()
        known = max(s for s in usable if s < step)
        position, found = self.positions[known], None
        later = min(s for s in self.samples if s >= step)
        checked = min((s for s in usable if s >= step), default=later)
        for number, samples in enumerate(self._batches(known, checked), known + 1):
            start = next_start(position, samples, self._windows_at(number))
            if number == step:
                found = ConsumedBatch(step, start, samples)
            position = start + samples
        if checked in self.positions and position != self.positions[checked]:
            raise DataError(
                f"{self.folder}: the records of steps {known} to {checked} do not fit together:"
                f" they end at position {position}, not {self.positions[checked]}.",
                fix="Was the run resumed with checkpoint.exclude_from_loading, or its data changed?"
                " Use the position: it is in the `resumed` events of metrics.jsonl.",
            )
        assert found is not None
        return found

    def check_data(self, step: int, properties: dict[str, Any]) -> None:
        """Raise DataError if the run had other data than `properties` at `step`."""
        later = [saved for saved in sorted(self.properties) if saved >= step]
        for saved in later[:1]:
            if wrong := self._other_data(saved, properties):
                raise DataError(
                    f"{self.folder}: step {step} had other data than config.toml names: the"
                    f" checkpoint of step {saved} differs in {', '.join(wrong)}.",
                    fix="Give a TOML with the data of that time, and the position.",
                )

    def lanes_before(self, position: int, properties: dict[str, Any]) -> Any:
        """The lanes of the last checkpoint up to `position` that has the data of `properties`."""
        known = [
            step
            for step in self.lanes
            if self.positions[step] <= position and not self._other_data(step, properties)
        ]
        return self.lanes[max(known, key=self.positions.__getitem__)] if known else {}

    def _other_data(self, saved: int, properties: dict[str, Any]) -> list[str]:
        """Names of `properties` that have another value in the checkpoint of step `saved`."""
        recorded = self.properties[saved]
        return [n for n in DATA_PROPERTIES if n in recorded and recorded[n] != properties.get(n)]

    def _batches(self, first: int, last: int) -> Iterator[int]:
        """Samples of the steps after `first`, up to `last`."""
        marks = sorted(s for s in self.samples if first <= s <= last)
        for begin, end in pairwise(marks):
            yield from self._batches_between(begin, end)

    def _batches_between(self, begin: int, end: int) -> list[int]:
        """Samples of the steps after `begin`, up to `end`, two steps whose counts are known."""
        steps, total = end - begin, self.samples[end] - self.samples[begin]
        planned = self._planned_batches(begin, steps)
        if sum(planned) == total:
            return planned
        if total > 0 and total % steps == 0:  # one size, of an earlier start of the run
            return [total // steps] * steps
        raise DataError(
            f"{self.folder}: steps {begin + 1} to {end} had {total} samples, which fits neither"
            " config.toml nor one batch size: the batch size changed between them.",
            fix="Use the position. With metrics.log_freq = 1, every step would be known.",
        )

    def _planned_batches(self, begin: int, steps: int) -> list[int]:
        training = self.config.training
        if training.global_batch_size == -1:  # depends on the layout
            return []
        schedule = build_batch_schedule(training, training.global_batch_size)
        tokens = self.samples[begin] * training.seq_len
        return list(islice(schedule.batches_from(tokens), steps))

    def _windows_at(self, step: int) -> tuple[PositionWindow, ...]:
        """The windows that apply to a step: of the roll-backs up to the last to an earlier step."""
        count = max((n for n, (to, _) in enumerate(self.rollbacks, 1) if to < step), default=0)
        return RollbackHistory(tuple(t for _, t in self.rollbacks[:count])).windows


def read_progress(folder: Path, config: JobConfig) -> RunProgress:
    """Read the records of a run; raises DataError."""
    progress = RunProgress(folder, config)
    steps, events = read_metrics(folder / METRICS_FILE)
    try:
        for record in steps:
            progress.samples[record["step"]] = record["samples"]
        for event in events:
            _add_event(progress, event)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{folder / METRICS_FILE}: is not the metrics of a run ({error!r})."
        ) from None
    if config.checkpoint.saves:
        _add_checkpoints(progress)
    return progress


def _add_event(progress: RunProgress, event: Record) -> None:
    if event["event"] == "resumed" and event["step"]:
        progress.positions[event["step"]] = event["position"]
        if not progress.rollbacks:  # so no position was skipped
            progress.samples.setdefault(event["step"], event["position"])
    if event["event"] == "rolled_back":
        window = PositionWindow(event["first_sample"], event["last_sample"] + 1, event["lr_factor"])
        trouble = Trouble(event["from_step"], 0, 0, "")
        progress.rollbacks.append((event["step"], RollbackTry(event["attempt"], trouble, window)))


def _add_checkpoints(progress: RunProgress) -> None:
    """Add what the checkpoints of the run record; those that cannot be read are left out."""
    parent = checkpoint_folder(progress.folder, progress.config.checkpoint)
    for step in list_steps(parent).steps:
        try:
            manifest = read_checkpoint_manifest(parent / f"step-{step}", sizes=False)
        except CheckpointError:
            continue
        progress.properties[step] = manifest.facts
        if manifest.progress and step <= max(progress.samples):
            position = manifest.progress["position"]
            progress.positions[step] = position
            progress.lanes[step] = manifest.progress.get("lanes", {})
            progress.samples[step] = position - sum(
                end - first for first, end in manifest.progress.get("gaps", ())
            )
