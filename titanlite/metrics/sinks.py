"""Where it is told what happened: metrics.jsonl, the console, TensorBoard, Weights & Biases."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from titanlite.errors import ConfigError
from titanlite.files import parse_json, write_file_atomically
from titanlite.log import logger
from titanlite.metrics.config import MetricsConfig, missing
from titanlite.metrics.console import open_console

CLOSE_SECONDS = 300.0  # for a service to take what it was not sent yet
METRICS_FILE = "metrics.jsonl"
REPLACED_FILE = "metrics.replaced.jsonl"  # lines of steps that were taken again
UNSAVED_FOLDER = "unsaved"  # records of runs without checkpoints, beside those of one that has some
STEP_KEYS = (  # of a step line, in this order
    "step",
    "loss",
    "z_loss",
    "grad_norm",
    "lr",
    "tokens",
    "samples",
    "loss_scale",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "step_seconds",
    "data_seconds",
    "peak_memory_gib",
    "time",
)


class Sink(Protocol):
    """One place that is told: of steps by `STEP_KEYS`, of events by `event`, `step` and more."""

    def step(self, record: dict[str, Any]) -> None: ...
    def event(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class MetricSinks:
    """All the places that are told; none of them on the ranks that stay silent.

    A sink never ends a run. One that raises OSError (a full disk) is tried again with each record;
    one that raises anything else is reported once and dropped.
    """

    def __init__(self, places: list[Sink]):
        self.places = places
        self.deaf: list[Sink] = []  # those whose last write failed

    def step(self, record: dict[str, Any]) -> None:
        """Tell of a step: every key of `STEP_KEYS` but `time`, which is added, and no other."""
        record = {**record, "time": time.time()}
        if record.keys() != set(STEP_KEYS):
            raise ValueError(f"not the keys of a step line: {record.keys() ^ set(STEP_KEYS)}")
        record = {key: record[key] for key in STEP_KEYS}
        for place in list(self.places):
            self._tell(place, place.step, record)

    def event(self, step: int, name: str, /, **fields: Any) -> None:
        """Tell of what happened at a step: `validation`, `checkpoint_saved` …

        Both are positional, so that a field can be called `name`, as validation's is.
        """
        record = {"event": name, "step": step, **fields, "time": time.time()}
        for place in list(self.places):
            self._tell(place, place.event, record)

    def sync(self) -> None:
        """Write all records so far to the disk, so that they survive a power cut."""
        for place in list(self.places):
            if isinstance(place, JsonlSink):
                self._tell(place, place.sync)

    def _tell(self, place: Sink, tell: Callable[..., None], *record: dict[str, Any]) -> None:
        name = type(place).__name__
        try:
            tell(*record)
        except OSError as error:
            if place not in self.deaf:
                logger.error("%s: write failed, records are being dropped: %s", name, error)
                self.deaf.append(place)
        except (
            Exception
        ) as error:  # of a package that is not ours: whatever it is, training goes on
            logger.error("%s failed and gets no more records: %r", name, error)
            self.places.remove(place)
        else:
            if place in self.deaf:
                logger.info("%s: writing again", name)
                self.deaf.remove(place)

    def close(self) -> None:
        """Finish what was begun; nothing can be told afterwards.

        A sink that takes longer than `CLOSE_SECONDS`, as of a service that does not answer, is left.
        """
        while self.places:
            place = self.places.pop()
            closing = threading.Thread(target=_close, args=(place,), name="close", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)
            if closing.is_alive():
                logger.error(
                    "%s: closing takes longer than %g s: what it has not sent is lost",
                    type(place).__name__,
                    CLOSE_SECONDS,
                )

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(self, *raised) -> None:
        self.close()


def _close(place: Sink) -> None:
    try:
        place.close()
    except Exception as error:  # of a package that is not ours: the run is done all the same
        logger.error("%s could not be closed: %r", type(place).__name__, error)


def no_sinks() -> MetricSinks:
    """For the ranks that do not write."""
    return MetricSinks([])


def open_sinks(
    config: MetricsConfig,
    folder: Path,
    *,
    total_steps: int,
    first_step: int,
    job: dict[str, Any],
    progress: bool | None = None,
) -> MetricSinks:
    """All that `config` asks for, under `folder`, for the one rank that writes.

    `first_step` is the step that the run goes on from: lines about later steps are moved to
    `metrics.replaced.jsonl`. `job` is what W&B shows as the run's settings. `progress` puts a live
    line on the terminal; by default where there is one. Raises ConfigError when an optional
    package is not installed, OSError when `folder` cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sinks = MetricSinks([])
    try:
        sinks.places.append(JsonlSink(folder / METRICS_FILE, first_step))
        if config.enable_tensorboard:
            sinks.places.append(TensorBoardSink(folder / config.save_tb_folder, first_step))
        if config.enable_wandb and (run := _start_wandb(folder, job)):
            sinks.places.append(run)
        colour = not config.disable_color_printing
        sinks.places.append(open_console(total_steps, first_step, colour, progress))
    except BaseException:
        sinks.close()
        raise
    return sinks


def metrics_folder(folder: Path, saves: bool) -> Path:
    """Where a run writes its records: `folder`, its job.dump_folder.

    A run that does not save checkpoints must not replace the records of one that does: where
    `folder` holds such records, it writes to the subfolder `unsaved`.
    """
    if saves or not _has_saved(folder / METRICS_FILE):
        return folder
    logger.warning(
        "%s holds the records of a run with checkpoints, and this run saves none: its records go"
        " to %s",
        folder,
        folder / UNSAVED_FOLDER,
    )
    return folder / UNSAVED_FOLDER


# --- metrics.jsonl -------------------------------------------------------------------------------


class JsonlSink:
    """One JSON object a line, on the disk's side of this process as soon as it is told."""

    def __init__(self, path: Path, first_step: int):
        drop_later_records(path, first_step)
        self.file = path.open("ab", buffering=0)

    def step(self, record: dict[str, Any]) -> None:
        text = json.dumps(_finite(record), allow_nan=False, ensure_ascii=False) + "\n"
        line, whole = text.encode(), self.file.seek(0, os.SEEK_END)
        if self.file.write(line) < len(line):  # the disk is full: no half lines
            self.file.truncate(whole)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.file.name)

    event = step

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def drop_later_records(path: Path, step: int) -> None:
    """Move lines about steps after `step`, and a half-written one, to `metrics.replaced.jsonl`.

    The run takes these steps again; otherwise each of them would have two lines.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_up_to(line, step)]
    if kept == lines:
        return
    replaced = path.with_name(REPLACED_FILE)
    with replaced.open(
        "ab"
    ) as file:  # first: a crash in between keeps a line twice, and loses none
        file.writelines(line.rstrip(b"\n") + b"\n" for line in lines if not _is_up_to(line, step))
        file.flush()
        os.fsync(file.fileno())
    write_file_atomically(path, b"".join(kept))
    moved = len(lines) - len(kept)
    logger.info("%s: %d lines after step %d moved to %s", path, moved, step, replaced)


def _is_up_to(line: bytes, step: int) -> bool:
    """Whether it is a whole line about a step not after `step`."""
    try:
        return line.endswith(b"\n") and parse_json(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _has_saved(path: Path) -> bool:
    """Whether a metrics.jsonl is of a run that has saved a checkpoint."""
    try:
        with path.open("rb") as lines:
            return any(b'"checkpoint_saved"' in line for line in lines)
    except FileNotFoundError:
        return False


def _finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- TensorBoard and W&B -------------------------------------------------------------------------


class TensorBoardSink:
    """Scalars under the names they have in metrics.jsonl, and validation/NAME/loss."""

    def __init__(self, folder: Path, first_step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing(
                "metrics.enable_tensorboard", "tensorboard", "pip install tensorboard"
            ) from error
        # what an earlier run wrote from there on is hidden by the reader
        self.writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def step(self, record: dict[str, Any]) -> None:
        self._write(record["step"], _scalars(record))

    def event(self, record: dict[str, Any]) -> None:
        self._write(record["step"], _event_scalars(record))

    def _write(self, step: int, scalars: Iterator[tuple[str, float]]) -> None:
        for name, value in scalars:
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # or a kill takes the last ten with it

    def close(self) -> None:
        self.writer.close()


class WandbSink:
    """The same scalars, sent away; WANDB_PROJECT, WANDB_RUN_ID, WANDB_MODE … mean what they do."""

    def __init__(self, folder: Path, job: dict[str, Any]):
        try:
            from wandb import init  # by name: a folder called wandb would import as well
        except ImportError as error:
            raise missing(
                "metrics.enable_wandb", "wandb", "pip install 'titanlite[wandb]'"
            ) from error
        self.run = init(
            project=os.environ.get("WANDB_PROJECT", "titanlite"),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            config=job,
            resume="allow",  # goes on with WANDB_RUN_ID, where the launcher sets it
        )

    def step(self, record: dict[str, Any]) -> None:
        self.run.log(dict(_scalars(record)), step=record["step"])

    def event(self, record: dict[str, Any]) -> None:
        if scalars := dict(_event_scalars(record)):
            self.run.log(scalars, step=record["step"])

    def close(self) -> None:
        self.run.finish()


def _start_wandb(folder: Path, job: dict[str, Any]) -> WandbSink | None:
    """A W&B run; None, and a line in the log, where the service refuses or cannot be reached."""
    try:
        return WandbSink(folder, job)
    except ConfigError:  # the package is missing
        raise
    except Exception as error:
        logger.error("Weights & Biases could not be started and gets no records: %r", error)
        return None


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name not in ("step", "time") and value is not None:
            yield name, value


def _event_scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    if record["event"] == "validation":
        yield f"validation/{record['name']}/loss", record["loss"]
