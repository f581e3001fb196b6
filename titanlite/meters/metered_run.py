"""What a meter is, and what it is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlite.data import SampleStream
from titanlite.metrics import MetricsConfig
from titanlite.models import ModelSizes, ModelSpec
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.training.periodic import PeriodicAction
from titanlite.training.run import Run
from titanlite.training.step import StepHook

if TYPE_CHECKING:  # these files import this one
    from titanlite.meters.replica_check import ReplicaCheckConfig
    from titanlite.meters.straggler import StragglerConfig


class Meter(NamedTuple):
    """The periodic action that records what is measured, and what measures inside a step."""

    action: PeriodicAction
    hook: StepHook | None = None


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
