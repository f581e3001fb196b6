"""One optimizer step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.elastic.rows import RankSlice
from titanlite.models import valid_tokens
from titanlite.optim import AdaptiveClip, OptimizerInBackward, StepSpan, clip_gradients
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine
from titanlite.training.spmd_engine import SetPhase, ignore_phase
from titanlite.training.state import TrainState


@dataclass(frozen=True)
class StepInputs:
    """What a step computes with."""

    batch: Batch  # this rank's part, on the device
    position: int  # of the first sample of the global batch
    tokens: int  # of the global batch
    valid: Tensor  # 0-d: valid labels of the global batch, at least 1
    loss_scale: float  # 1 without one
    own: RankSlice  # the samples of the global batch that this rank has


class StepHook:
    """Takes part in every step; each method does nothing here.

    A step that is replayed calls `before_forward` and `after_backward` again.
    """

    def before_forward(self, inputs: StepInputs, set_phase: SetPhase) -> None:
        """Called when the labels are counted."""

    def after_backward(self) -> None:
        """Called when the gradients are complete."""

    def after_update(self, result: StepResult) -> None:
        """Called unless the host skips the step; it updated nothing if `result.accept` is false."""


class WeighedLabels(NamedTuple):
    """A loss as a weighted sum of the cross-entropies of labels; see `StepSettings.objective`."""

    weights: Tensor  # [B, T] in fp32: of this rank's batch
    divisor: Tensor  # 0-d: what the weighted sum over the global batch is divided by
    loss: Tensor  # 0-d: of the global batch, to be logged


@dataclass(frozen=True)
class StepSettings:
    """Settings that are the same in every optimizer step of a run."""

    mesh: Mesh
    clip_norm: float  # clip the gradient to this 2-norm; 0: no clipping by the norm
    optimizer_in_backward: OptimizerInBackward | None = None  # updates parameters during backward
    adaptive_clip: AdaptiveClip | None = None  # clip each output unit, not the whole gradient
    judge: Callable[[Tensor, Tensor], Tensor] | None = None
    # (loss, gradient norm), each 0-d -> whether [] to update the parameters; None: always
    hooks: tuple[StepHook, ...] = ()
    objective: Callable[[StepInputs, SetPhase], WeighedLabels] | None = None
    # A loss f of log-probabilities has the gradient of the sum of cross-entropies with the weights
    # -df/d(log-probability), which this returns; a replay calls it again. None: cross-entropy


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step. The tensors are on the device: reading a value waits for it."""

    loss: Tensor  # 0-d: mean cross-entropy of the global batch's valid tokens, before the update
    # (or that of the objective)
    z_loss: Tensor  # 0-d: mean of the auxiliary z-loss, which is not part of `loss`
    grad_norm: Tensor  # 0-d: 2-norm of the whole gradient, before clipping
    own_norms: Tensor  # [parameters of this rank]: 2-norms of this rank's gradient shards
    grad_factor: Tensor | None  # 0-d: multiplies the gradients in the update; None: 1
    own_losses: Tensor  # [2]: this rank's shares of `loss` and `z_loss`
    lr: float  # before the factors of optimizer.groups and of muP
    samples: int  # of the step, over all ranks
    tokens: int  # of the step, over all ranks
    mtp_losses: Tensor | None = None  # [depths]: mean cross-entropy of each; None: no depths
    overflowed: bool = False  # float16 gradients overflowed, and a smaller loss scale can help
    accept: Tensor | None = None  # 0-d: whether the judge accepted this step and all before it
    rejected: bool = False  # the guard decided not to update the parameters

    @property
    def skipped(self) -> bool:
        """Whether the host knows that this step updated no parameter."""
        return self.overflowed or self.rejected


def take_step(
    state: TrainState,
    engine: Engine,
    batch: Batch,
    *,
    settings: StepSettings,
    set_phase: SetPhase = ignore_phase,
) -> StepResult:
    """Take one optimizer step; `batch` is this rank's part of the global batch, on the device.

    Calls `set_phase` at the start of each phase: labels, forward, backward, step. With a judge, the
    step updates the parameters only if the judge accepts it, which the host need not know.
    """
    result = compute_gradients(state, engine, batch, settings=settings, set_phase=set_phase)
    if settings.judge is not None and not result.overflowed:
        accept = settings.judge(result.loss, result.grad_norm)
        result = dataclasses.replace(result, accept=accept)
    finish_step(state, result, settings)
    return result


def compute_gradients(
    state: TrainState,
    engine: Engine,
    batch: Batch,
    *,
    settings: StepSettings,
    set_phase: SetPhase = ignore_phase,
) -> StepResult:
    """The first part of a step: forward, backward and the norm of the gradients.

    Changes no parameter, unless the optimizer steps in backward.
    """
    mesh, in_backward = settings.mesh, settings.optimizer_in_backward
    set_phase("labels")  # before the all-reduce, the first call that can hang
    # Over the batch dimension only: context- and tensor-parallel ranks have the same labels.
    valid = all_reduce_sum(mesh.batch, valid_tokens(batch.labels)).clamp(min=1)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    rows = len(batch.inputs)
    samples = batch.own.batch if batch.own else rows * mesh.batch.size()
    tokens = samples * batch.inputs.shape[1]
    lr = state.optimizer.follow_schedule(  # before backward, which may already update parameters
        StepSpan(state.step, state.counters.tokens, tokens), state.counters.lr_factor(samples)
    )
    start = state.counters.next_start(samples)
    own = batch.own or RankSlice(start + rows * mesh.batch_rank, rows, samples)
    inputs = StepInputs(batch, start, tokens, valid, scale, own)
    for hook in settings.hooks:
        hook.before_forward(inputs, set_phase)
    divisor, objective_loss = valid, None
    if settings.objective is not None:
        weights, divisor, objective_loss = settings.objective(inputs, set_phase)
        batch = dataclasses.replace(batch, weights=weights)
    own_losses = engine.forward_backward(batch, divisor / scale, set_phase) / scale
    losses = all_reduce_sum(mesh.loss, own_losses.clone())
    loss, depth_sums = losses[0], losses[2:].view(2, -1)  # see `sums_of_depths`
    loss = loss if objective_loss is None else objective_loss
    for hook in settings.hooks:
        hook.after_backward()
    set_phase("step")
    if in_backward:
        norms = in_backward.norms(mesh)
    else:
        parameters = state.model.parameters()
        norms = clip_gradients(parameters, settings.clip_norm, mesh, scale, settings.adaptive_clip)
    return StepResult(
        loss=loss,
        z_loss=losses[1],
        grad_norm=norms.total,
        own_norms=norms.own,
        grad_factor=norms.factor,
        own_losses=own_losses[:2],
        mtp_losses=depth_sums[0] / depth_sums[1].clamp(min=1e-12) if depth_sums.numel() else None,
        lr=lr,
        samples=samples,
        tokens=tokens,
        overflowed=_overflows(state, loss, norms.total, settings.judge is not None),
    )


def _overflows(state: TrainState, loss: Tensor, grad_norm: Tensor, has_judge: bool) -> bool:
    """Whether float16 gradients overflowed, and a smaller loss scale can help.

    All ranks have the same values, so all decide the same. The judge sees what no loss scale
    repairs: inf or NaN in the loss, and gradients that overflow by themselves.
    """
    if state.loss_scale is None or (has_judge and not state.loss_scale.shrinkable):
        return False
    fits = grad_norm.isfinite() | ~loss.isfinite() if has_judge else grad_norm.isfinite()
    return not fits  # waits for the device


def finish_step(state: TrainState, result: StepResult, settings: StepSettings) -> None:
    """The second part of a step: update the parameters, unless the step is to be skipped."""
    if not result.skipped:
        if settings.optimizer_in_backward is None:
            state.optimizer.step(result.accept, result.grad_factor)
        for hook in settings.hooks:
            hook.after_update(result)
    state.optimizer.zero_grad()
    if state.loss_scale is not None and not result.rejected:
        state.loss_scale.update(not result.overflowed)
    state.counters.advance(result.samples, result.tokens)
