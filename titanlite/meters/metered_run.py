"""What a meter is, what it is built from, and the sections of meters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from titanlite.data import SampleStream
from titanlite.metrics import MetricsConfig
from titanlite.models import ModelSizes, ModelSpec
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.settings import Range
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.run import Run
from titanlite.training.step import StepHook


@dataclass(frozen=True)
class ReplicaCheckConfig:
    """[replica_check] Compare replicas of weights, optimizer state and generators, bit by bit."""

    freq: Annotated[int, Range(0)] = 0
    # steps between two checks; each save is preceded by one, too; 0: never
    action: Literal["stop", "warn"] = "stop"
    # when replicas differ: end the run with exit code 3 before the state is saved, or log an error


@dataclass(frozen=True)
class StragglerConfig:
    """[straggler] Report ranks that are slower than the others."""

    freq: Annotated[int, Range(0)] = 0  # steps between two reports; 0: none
    threshold: Annotated[float, Range(1)] = 6.0
    # robust standard deviations above the median from which a rank counts as slow; a standard
    # deviation is at least 2.5 % of the median


class Meter(NamedTuple):
    """The periodic action that records what is measured, and what measures inside a step."""

    action: PeriodicAction
    hook: StepHook | None = None


class ArmedHook(StepHook):
    """A hook that measures in the step after `arm`, and only then; see `measure_steps`."""

    def __init__(self) -> None:
        self._armed = False
        self._measured: Any = None

    def arm(self) -> None:
        self._armed = True

    def take(self) -> Any:
        """What was measured in the armed step, once; None if it was not armed."""
        measured, self._measured, self._armed = self._measured, None, False
        return measured


class StepMeter(Protocol):
    """A meter that is armed before a step, and measures while the step runs."""

    def arm(self) -> None:
        """Measure the next step."""

    def take(self) -> Any:
        """Return what was measured since `arm`, and forget it; disarms the meter."""


def measure_steps(
    name: str, freq: int, meter: StepMeter, record: Callable[[StepInfo], None], last: int = 0
) -> PeriodicAction:
    """Arm `meter` before every `freq`-th step and step `last`, and call `record` after it.

    `record` calls `meter.take`.
    """

    def measures(step: int) -> bool:
        return step % freq == 0 or step == last

    def arm_if_next(step: int) -> None:
        if measures(step + 1):
            meter.arm()

    def start(step: int) -> None:
        meter.take()  # discard what it measured in a step that was rolled back
        arm_if_next(step)

    def run(info: StepInfo) -> None:
        if measures(info.step):
            record(info)
        arm_if_next(info.step)

    def is_due(info: StepInfo) -> bool:
        return measures(info.step) or measures(info.step + 1)

    return PeriodicAction(name, is_due, run, needs_accepted=True, start=start)


@dataclass(frozen=True)
class MeteredRun:
    """A run whose meters are to be built, and what they need beside it."""

    run: Run
    metrics: MetricsConfig
    replica_check: ReplicaCheckConfig
    straggler: StragglerConfig
    spec: ModelSpec[Any]
    sizes: ModelSizes
    sharded: ShardedModel
    layout: ParallelLayout
    stream: SampleStream
