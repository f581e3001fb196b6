"""The gradient noise scale, measured in some steps by one more forward and backward.

B_simple = tr(Sigma) / |G|^2 (https://arxiv.org/abs/1812.06162): Sigma is the covariance of the
gradients of single sequences, G their mean. Training with batches much smaller than B_simple wastes
little data, with batches much larger little time.

The large batch is the global batch. The small one is its first half, whatever the layout: so every
layout measures the same, even if it never has the gradient of a single rank or micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.labels import IGNORE_INDEX
from titanlite.meters.expert_load import ExpertLoad
from titanlite.meters.metered_run import ArmedHook, Meter, MeteredRun, measure_steps
from titanlite.models import valid_tokens
from titanlite.optim import clip_gradients
from titanlite.training.engine import Engine
from titanlite.training.periodic import StepInfo
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.state import TrainState
from titanlite.training.step import StepInputs, StepResult


class NoiseEstimate(NamedTuple):
    """Unbiased estimates from one step; noise can make either negative."""

    gradient: float  # |G|^2: square norm of the mean gradient
    noise: float  # tr(Sigma): variance of the gradient of one sequence


def estimate_noise(
    small_square: float, small_batch: float, large_square: float, large_batch: float
) -> NoiseEstimate:
    """Estimates from the square norms of the mean gradients of two batches (appendix A.1).

    The small batch may be a part of the large one; both sizes are in sequences. The variance of a
    mean gradient is proportional to 1 / labels, so a sequence counts by its share of the labels.
    """
    difference = large_batch * large_square - small_batch * small_square
    return NoiseEstimate(
        gradient=difference / (large_batch - small_batch),
        noise=(small_square - large_square) / (1 / small_batch - 1 / large_batch),
    )


@dataclass
class NoiseScale:
    """Separate moving averages of both estimates: an average of their ratios would be biased."""

    decay: float = 0.95  # of the averages, for each measurement
    gradient: float = 0.0
    noise: float = 0.0
    weight: float = 0.0  # of all measurements in the averages, which start at 0

    def update(self, estimate: NoiseEstimate) -> None:
        old, new = self.decay, 1 - self.decay
        self.gradient = old * self.gradient + new * estimate.gradient
        self.noise = old * self.noise + new * estimate.noise
        self.weight = old * self.weight + new

    @property
    def mean(self) -> NoiseEstimate:
        """The averages without the bias of their start; after one `update` or more."""
        return NoiseEstimate(self.gradient / self.weight, self.noise / self.weight)

    @property
    def critical_batch(self) -> float | None:
        """B_simple in sequences; None while noise makes an average negative or 0."""
        if self.gradient <= 0 or self.noise <= 0:
            return None
        return self.noise / self.gradient

    def state(self) -> dict[str, Any]:
        return {"gradient": self.gradient, "noise": self.noise, "weight": self.weight}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the averages that `state` returned; None: those at the start."""
        state = NoiseScale().state() if state is None else state
        self.gradient, self.noise, self.weight = state["gradient"], state["noise"], state["weight"]


class Measurement(NamedTuple):
    """The small batch of a step that was measured."""

    grad_norm: Tensor  # 0-d: 2-norm of its mean gradient, on the device
    share: Tensor  # 0-d: its share of the valid labels of the large batch, on the device


class NoiseMeter(ArmedHook):
    """In an armed step, first computes the gradient of the small batch: a `Measurement`.

    That is one more forward and backward, in which the labels of the other half are ignored; the
    balancing losses of experts, which have no labels, are those of the large batch. The gradient is
    freed before that of the step is computed, whose result is bit-equal to that without measuring.
    """

    def __init__(self, engine: Engine, state: TrainState, mesh: Mesh):
        super().__init__()
        self._engine, self._state, self._mesh = engine, state, mesh

    def before_forward(self, inputs: StepInputs, set_phase: SetPhase) -> None:
        if not self._armed:
            return
        self._armed = False
        batch, own = inputs.batch, inputs.own
        labels = batch.labels.clone()
        labels[max(own.batch // 2 - (own.first - inputs.position), 0) :] = IGNORE_INDEX
        valid = all_reduce_sum(self._mesh.batch, valid_tokens(labels))
        divisor = valid.clamp(min=1) / inputs.loss_scale
        half = replace(batch, labels=labels)
        self._engine.forward_backward(half, divisor, lambda name: set_phase(f"noise {name}"))
        parameters = self._state.model.parameters()
        norm = clip_gradients(parameters, 0.0, self._mesh, inputs.loss_scale).total
        self._state.optimizer.zero_grad()
        if isinstance(load := self._state.parts.get("expert_load"), ExpertLoad):
            load.forget()
        self._measured = Measurement(norm, valid / inputs.valid)


def build_noise_scale(metered: MeteredRun) -> Meter | None:
    """Write the event `noise_scale` of every `metrics.noise_scale_freq`-th step."""
    run, average = metered.run, metered.run.state.parts.get("noise_scale")
    if not isinstance(average, NoiseScale):
        return None
    meter = NoiseMeter(run.engine, run.state, run.step_settings.mesh)

    def record(info: StepInfo) -> None:
        if measured := meter.take():
            run.sinks.event(info.step, "noise_scale", **_fields(measured, average, info.result))

    freq = metered.metrics.noise_scale_freq
    return Meter(measure_steps("noise scale", freq, meter, record), meter)


def _fields(measurement: Measurement, average: NoiseScale, result: StepResult) -> dict[str, Any]:
    """The fields of the event; waits for the device."""
    fields: dict[str, Any] = {"critical_batch": None, "critical_batch_tokens": None}
    if result.samples == 1:
        return fields | {"reason": "the global batch has one sequence"}
    share = measurement.share.item()
    if not 0 < share < 1:
        return fields | {"reason": "one half of the global batch has no labels"}
    small, large = measurement.grad_norm.item(), result.grad_norm.item()
    if result.skipped or not (math.isfinite(small) and math.isfinite(large)):
        return fields | {"reason": "a gradient is inf or NaN, or the step was skipped"}
    average.update(estimate_noise(small**2, share * result.samples, large**2, result.samples))
    gradient, noise = average.mean
    fields |= {"gradient_square": gradient, "noise": noise}
    if (critical := average.critical_batch) is None:
        return fields | {"reason": "too few measurements for this much noise"}
    tokens = critical * (result.tokens // result.samples)
    return fields | {"critical_batch": critical, "critical_batch_tokens": tokens}
