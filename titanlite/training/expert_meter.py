"""A periodic action that records the load of the experts."""

from __future__ import annotations

from titanlite.metrics import MetricSinks
from titanlite.training.expert_load import ExpertLoad
from titanlite.training.periodic import PeriodicAction, StepInfo


def record_expert_load(load: ExpertLoad, sinks: MetricSinks, freq: int) -> PeriodicAction:
    """Write the event `expert_load` for every step that has a step line."""

    def write(info: StepInfo) -> None:
        statistics = load.statistics(info.result.expert_load, info.result.tokens)
        if not info.result.skipped:
            sinks.event(info.step, "expert_load", **statistics._asdict())

    def is_due(info: StepInfo) -> bool:
        return info.step == 1 or info.step % freq == 0 or info.ends_run

    return PeriodicAction("log", is_due, write, needs_accepted=True)
