"""Measure the gradient noise scale in some steps, by one more forward and backward.

The large batch is the global batch. The small one is its first half, whatever the layout: so every
layout measures the same, even if it never has the gradient of a single rank or micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.labels import IGNORE_INDEX
from titanlite.metrics import MetricSinks
from titanlite.models import valid_tokens
from titanlite.optim import NoiseScale, combine_norms, estimate_noise, shard_norms
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine, SetPhase, ignore_phase
from titanlite.training.measured_steps import measure_steps
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.state import TrainState
from titanlite.training.step import StepResult


class Measurement(NamedTuple):
    """The small batch of a step that was measured."""

    grad_norm: Tensor  # 0-d: 2-norm of its mean gradient, on the device
    share: Tensor  # 0-d: its share of the valid labels of the large batch, on the device
    global_batch: int  # sequences of the large batch
    seq_len: int  # tokens of a sequence


class NoiseScaleEngine:
    """An engine that, in an armed step, first computes the gradient of the small batch.

    That is one more forward and backward, in which the labels of the other half are ignored; the
    balancing losses of experts, which have no labels, are those of the large batch. The gradient is
    freed before that of the step is computed, so the result of the step is bit-equal to that of a
    step without the measurement.
    """

    def __init__(self, engine: Engine, state: TrainState, mesh: Mesh):
        self._engine, self._state, self._mesh = engine, state, mesh
        self._armed = False
        self._measurement: Measurement | None = None

    def arm(self) -> None:
        """Measure the next step."""
        self._armed = True

    def take(self) -> Measurement | None:
        """The measurement of the armed step, once; None if there was none."""
        measurement, self._measurement, self._armed = self._measurement, None, False
        return measurement

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """See `Engine.prepare`."""
        return self._engine.prepare(inputs, labels)

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See `Engine.evaluate`."""
        return self._engine.evaluate(inputs, labels)

    def forward_backward(
        self, batch: Batch, valid: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """See `Engine.forward_backward`."""
        if self._armed:
            self._armed = False
            self._measurement = self._measure(batch, valid, set_phase)
        return self._engine.forward_backward(batch, valid, set_phase)

    def _measure(self, batch: Batch, scaled_valid: Tensor, set_phase: SetPhase) -> Measurement:
        own, seq_len = batch.labels.shape
        global_batch = own * self._mesh.batch.size()
        small_batch = global_batch // 2
        if not small_batch:
            return Measurement(torch.zeros(()), torch.zeros(()), global_batch, seq_len)
        own_small = min(max(small_batch - own * self._mesh.batch_rank, 0), own)
        labels = batch.labels.clone()
        labels[own_small:] = IGNORE_INDEX
        valid = all_reduce_sum(self._mesh.batch, valid_tokens(labels))
        scale = 1.0 if self._state.loss_scale is None else self._state.loss_scale.value
        divisor = valid.clamp(min=1) / scale
        self._engine.forward_backward(replace(batch, labels=labels), divisor, set_phase)
        parameters = list(self._state.model.parameters())
        grads = [parameter.grad for parameter in parameters]
        norms = iter(shard_norms([grad for grad in grads if grad is not None]))
        each = [None if grad is None else next(norms) for grad in grads]
        norm = combine_norms(parameters, each, self._mesh).total / scale
        self._state.optimizer.zero_grad()
        if self._state.expert_load is not None:
            self._state.expert_load.forget()
        return Measurement(norm, valid / (scaled_valid * scale), global_batch, seq_len)


def measure_noise_scale(
    engine: NoiseScaleEngine, state: TrainState, sinks: MetricSinks, freq: int
) -> PeriodicAction:
    """Write the event `noise_scale` of every `freq`-th step; the state has the averages."""
    average = state.noise_scale
    assert average is not None, "a run that measures it has it in its state"

    def record(info: StepInfo) -> None:
        if measurement := engine.take():
            fields = _fields(measurement, average, info.result)
            sinks.event(info.step, "noise_scale", **fields)

    return measure_steps("noise scale", freq, state.step, engine, record)


def _fields(measurement: Measurement, average: NoiseScale, result: StepResult) -> dict[str, Any]:
    """The fields of the event; waits for the device."""
    fields: dict[str, Any] = {"critical_batch": None, "critical_batch_tokens": None}
    if measurement.global_batch == 1:
        return fields | {"reason": "the global batch has one sequence"}
    share = measurement.share.item()
    if not 0 < share < 1:
        return fields | {"reason": "one half of the global batch has no labels"}
    small, large = measurement.grad_norm.item(), result.grad_norm.item()
    if result.skipped or not (math.isfinite(small) and math.isfinite(large)):
        return fields | {"reason": "a gradient is inf or NaN, or the step was skipped"}
    large_batch = measurement.global_batch
    average.update(estimate_noise(small**2, share * large_batch, large**2, large_batch))
    gradient, noise = average.mean
    fields |= {"gradient_square": gradient, "noise": noise}
    if (critical := average.critical_batch) is None:
        return fields | {"reason": "too few measurements for this much noise"}
    tokens = critical * measurement.seq_len
    return fields | {"critical_batch": critical, "critical_batch_tokens": tokens}
