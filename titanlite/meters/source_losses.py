"""The loss, the tokens and the epochs of each source, in some steps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.data import SampleStream
from titanlite.distributed.collectives import all_reduce_sum
from titanlite.meters.metered_run import ArmedHook, Meter, MeteredRun, measure_steps
from titanlite.models import OutputLayer
from titanlite.parallelize import ParallelLayout
from titanlite.training.periodic import StepInfo
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.step import StepInputs


class SourceLosses(ArmedHook):
    """Measures each source's mean cross-entropy in an armed step: [sources], NaN without tokens."""

    def __init__(self, stream: SampleStream, output: OutputLayer | None, layout: ParallelLayout):
        """`output`: the output layer; None on a pipeline rank without it."""
        super().__init__()
        self._stream, self._output, self._mesh = stream, output, layout.mesh
        self._microbatches = _microbatch_order(layout)

    def before_forward(self, inputs: StepInputs, set_phase: SetPhase) -> None:
        if not self._armed:
            return
        labels, own = inputs.batch.labels, inputs.own
        numbers = self._stream.sources_at(own.first, own.sequences)
        numbers = F.pad(numbers, (0, len(labels) - own.sequences), value=-1)  # idle ones
        names = torch.arange(len(self._stream.names))
        self._sources = (numbers[:, None] == names).to(labels.device)  # [B, sources]: bool
        counts = ((labels >= 0).sum(1, keepdim=True) * self._sources).sum(0)
        self._labels = all_reduce_sum(self._mesh.batch, counts)  # [sources]: of the global batch
        self._sums = torch.zeros(len(names), device=labels.device)  # of this rank's cross-entropy
        self._forwards = 0  # of the output layer in this step
        if self._output is not None:
            self._output.observe_token_losses(self._add)

    def _add(self, token_losses: Tensor) -> None:
        """Add the cross-entropy [B, T] of a micro-batch."""
        size = len(token_losses)
        run, number = divmod(self._forwards, len(self._microbatches))
        first = size * (run * len(self._microbatches) + self._microbatches[number])
        sources = self._sources[first : first + size]
        # where: inf of one source must not become NaN of another
        of_sequences = token_losses.sum(1, keepdim=True)
        self._sums += torch.where(sources, of_sequences, 0.0).sum(0)
        self._forwards += 1

    def after_backward(self) -> None:
        if not self._armed:
            return
        if self._output is not None:
            self._output.observe_token_losses(None)
        self._measured = all_reduce_sum(self._mesh.loss, self._sums) / self._labels


def _microbatch_order(layout: ParallelLayout) -> list[int]:
    """The micro-batches of a run of the schedule, as the last stage computes them."""
    if layout.mesh.pp.size() == 1:
        return [0]
    plan = layout.plan
    last = len(plan.stages) - 1
    actions = plan.order()[plan.rank_of[last]]
    return [a.microbatch for a in actions if a.kind == "forward" and a.stage == last]


def build_source_losses(metered: MeteredRun) -> Meter | None:
    """Write the event `source_losses` every `metrics.source_loss_freq` steps, and of the last."""
    run, stream, freq = metered.run, metered.stream, metered.metrics.source_loss_freq
    if not freq or len(stream.names) == 1:
        return None
    meter = SourceLosses(stream, metered.sharded.output, metered.layout)

    def record(info: StepInfo) -> None:
        losses = meter.take()
        if losses is None or not run.sinks.sinks:
            return
        consumed = stream.shares(run.state.counters.consumed)
        values = [value if math.isfinite(value) else None for value in losses.tolist()]
        run.sinks.event(
            info.step,
            "source_losses",
            loss={s.name: loss for s, loss in zip(consumed, values, strict=True)},
            tokens={share.name: share.tokens for share in consumed},
            epochs={share.name: share.epochs for share in consumed},
        )

    return Meter(measure_steps("log", freq, meter, record, last=run.training.steps), meter)
