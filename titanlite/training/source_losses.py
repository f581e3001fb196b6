"""A periodic action that records the loss, the tokens and the epochs of each source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from titanlite.data import SourceShare
from titanlite.metrics import MetricSinks
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.state import TrainState


def record_source_losses(
    state: TrainState,
    shares: Callable[[Iterable[tuple[int, int]]], Sequence[SourceShare]],
    sinks: MetricSinks,
    freq: int,
) -> PeriodicAction:
    """Write the event `source_losses` every `freq` steps, and after the last one.

    `shares(ranges)` returns the share of each source in the positions of `ranges`.
    """

    def write(info: StepInfo) -> None:
        if info.result.source_losses is None or not sinks.sinks:
            return
        consumed = shares(state.counters.consumed)
        losses = [
            value if math.isfinite(value) else None for value in info.result.source_losses.tolist()
        ]
        sinks.event(
            info.step,
            "source_losses",
            loss={s.name: loss for s, loss in zip(consumed, losses, strict=True)},
            tokens={share.name: share.tokens for share in consumed},
            epochs={share.name: share.epochs for share in consumed},
        )

    def is_due(info: StepInfo) -> bool:
        return info.step % freq == 0 or info.ends_run

    return PeriodicAction("log", is_due, write, needs_accepted=True)
