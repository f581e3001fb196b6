"""[metrics], and the sinks that write the records of a run: metrics.jsonl, console and others."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from titanlite.errors import ConfigError
from titanlite.log import logger
from titanlite.metrics.console import Console
from titanlite.metrics.jsonl import METRICS_FILE, JsonlSink
from titanlite.settings import NotNegative, Positive
from titanlite.threads import DeviceThread

CLOSE_SECONDS = 300.0  # time for a service to receive the records that were not sent yet


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics] How often metrics are recorded, and where they are written."""

    log_freq: Positive = 10  # steps between two step records
    enable_tensorboard: bool = False  # also write TensorBoard event files
    disable_color_printing: bool = False  # print without colors
    save_tb_folder: str = "tb"  # TensorBoard's folder, under job.dump_folder
    enable_wandb: bool = False  # also send the records to Weights & Biases
    layer_norms_freq: NotNegative = 0
    # steps between two records of each layer's gradient, weight and update norm; 0: none
    noise_scale_freq: NotNegative = 0
    # steps between two measurements, each a forward and backward, of the noise scale; 0: none
    source_loss_freq: NotNegative = 100
    # steps between two records of each source's loss, tokens and epochs; 0: none; with one source
    # there are none


def check_metrics_config(config: MetricsConfig) -> Iterator[ConfigError]:
    """Reject W&B where its package is not installed."""
    spec = importlib.util.find_spec("wandb") if config.enable_wandb else None
    is_installed = spec is not None and spec.origin is not None  # a mere folder has no origin
    if config.enable_wandb and not is_installed:
        yield ConfigError(
            "metrics.enable_wandb = true, but wandb is not installed.",
            fix="pip install 'titanlite[wandb]'",
        )


class Sink(Protocol):
    """Writes records of steps, and of events, which have the keys `event` and `step`."""

    def step(self, record: dict[str, Any]) -> None: ...
    def event(self, record: dict[str, Any]) -> None: ...
    def roll_back(self, step: int, rollbacks: int) -> None: ...  # see MetricSinks.roll_back
    def close(self) -> None: ...


@dataclass(frozen=True)
class SinkContext:
    """What a sink may need to know about the run."""

    config: MetricsConfig
    folder: Path  # of the run's records
    total_steps: int
    completed_steps: int
    # of the checkpoint that the run resumes from, else 0; records of later steps are moved to
    # metrics.replaced.jsonl
    job: dict[str, Any]  # the settings, for services that show them
    rollbacks: int = 0  # how often the run was rolled back before it came to completed_steps


def open_tensorboard(run: SinkContext) -> Sink | None:
    """The sink of TensorBoard's files; None if it is disabled."""
    if not run.config.enable_tensorboard:
        return None
    from titanlite.metrics.services import TensorBoardSink

    return TensorBoardSink(run.folder / run.config.save_tb_folder, run.completed_steps)


def open_wandb(run: SinkContext) -> Sink | None:
    """The sink of Weights & Biases; None if it is disabled, or if the service refuses."""
    if not run.config.enable_wandb:
        return None
    from titanlite.metrics.services import WandbSink

    try:
        return WandbSink(run.folder, run.job)
    except Exception as error:  # any error of a foreign package: the run needs no records there
        logger.error("Weights & Biases could not be started and gets no records: %r", error)
        return None


def open_console(run: SinkContext) -> Console:
    """Log lines, with colour on a terminal."""
    colour = sys.stderr.isatty() and not run.config.disable_color_printing
    return Console(run.total_steps, colour)


SINKS: dict[str, Callable[[SinkContext], Sink | None]] = {
    # name -> builder, which returns None for a disabled or unavailable sink; add a sink here
    "jsonl": lambda run: JsonlSink(run.folder / METRICS_FILE, run.completed_steps, run.rollbacks),
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "console": open_console,
}


class MetricSinks:
    """All sinks of a run; none on the ranks that do not write.

    A sink never ends a run: one with an OSError (a full disk) is tried again, others are removed.
    """

    def __init__(self) -> None:
        self.sinks: list[Sink] = []
        self.failed: list[Sink] = []  # those whose last write failed

    def step(self, record: dict[str, Any]) -> None:
        """Write a step record, see `periodic.log_metrics`; `time` is added."""
        record = {**record, "time": time.time()}
        for sink in list(self.sinks):
            self._write(sink, sink.step, record)

    def event(self, step: int, name: str, /, **fields: Any) -> None:
        """Write an event record: `validation`, `checkpoint_saved` …

        `step` and `name` are positional, so that a field can be called `name`, as in `validation`.
        """
        record = {"event": name, "step": step, **fields, "time": time.time()}
        for sink in list(self.sinks):
            self._write(sink, sink.event, record)

    def roll_back(self, step: int, rollbacks: int) -> None:
        """Continue from an earlier step, like sinks opened with `completed_steps` = `step`.

        `rollbacks`: how often the run was rolled back before; the events of these are kept.
        """
        for sink in list(self.sinks):
            self._write(sink, partial(sink.roll_back, step, rollbacks))

    def has_event(self, step: int, name: str) -> bool:
        """Whether metrics.jsonl has such an event; False on ranks without it."""
        return any(isinstance(s, JsonlSink) and s.has_event(step, name) for s in self.sinks)

    def sync(self) -> None:
        """Flush all records to the disk, so that they survive a power failure."""
        for sink in list(self.sinks):
            if isinstance(sink, JsonlSink):
                self._write(sink, sink.sync)

    def _write(self, sink: Sink, write: Callable[..., None], *record: dict[str, Any]) -> None:
        name = type(sink).__name__
        try:
            write(*record)
        except OSError as error:
            if sink not in self.failed:
                logger.error("%s: write failed, records are being dropped: %s", name, error)
                self.failed.append(sink)
        except Exception as error:  # any error of a foreign package: training continues
            logger.error("%s failed and gets no more records: %r", name, error)
            self.sinks.remove(sink)
        else:
            if sink in self.failed:
                logger.info("%s: writing again", name)
                self.failed.remove(sink)

    def close(self) -> None:
        """Close all sinks; later records are dropped.

        One that takes longer than `CLOSE_SECONDS`, as a service may, is abandoned.
        """
        while self.sinks:
            sink = self.sinks.pop()
            closing = DeviceThread(_close_sink, "close", (sink,))
            closing.start()
            closing.join(CLOSE_SECONDS)
            if closing.is_alive():
                logger.error(
                    "%s: not closed after %g s: records that it has not sent are lost",
                    type(sink).__name__,
                    CLOSE_SECONDS,
                )

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(self, *raised) -> None:
        self.close()


def _close_sink(sink: Sink) -> None:
    try:
        sink.close()
    except Exception as error:  # any error of a foreign package: the run has ended anyway
        logger.error("%s could not be closed: %r", type(sink).__name__, error)


def open_sinks(context: SinkContext) -> MetricSinks:
    """All enabled sinks, for the one rank that writes; raises OSError."""
    context.folder.mkdir(parents=True, exist_ok=True)
    sinks = MetricSinks()
    try:
        for build_sink in SINKS.values():
            if (sink := build_sink(context)) is not None:
                sinks.sinks.append(sink)
    except BaseException:
        sinks.close()
        raise
    return sinks
