"""One optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.models import valid_tokens
from titanlite.optim import AdaptiveClip, OptimizerInBackward, Progress, clip_gradients
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine, SetPhase, ignore_phase
from titanlite.training.state import TrainState


@dataclass(frozen=True)
class StepSettings:
    """Settings that are the same in every optimizer step of a run."""

    mesh: Mesh
    max_norm: float  # clip the gradient to this 2-norm; 0: do not clip
    optimizer_in_backward: OptimizerInBackward | None = None  # updates parameters during backward
    adaptive_clip: AdaptiveClip | None = None  # clip each output unit, not the whole gradient


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step. The tensors are on the device: reading a value waits for it."""

    loss: Tensor  # 0-d: mean cross-entropy of the global batch's valid tokens, before the update
    z_loss: Tensor  # 0-d: mean of the auxiliary z-loss, which is not part of `loss`
    grad_norm: Tensor  # 0-d: 2-norm of the whole gradient, before clipping
    own_norms: Tensor  # [parameters of this rank]: 2-norms of this rank's gradient shards
    lr: float  # of parameters outside optimizer.groups
    tokens: int  # of the step, over all ranks
    skipped: bool = False  # float16 gradients overflowed: no update, the loss scale shrinks


def take_step(
    state: TrainState,
    engine: Engine,
    batch: Batch,
    *,
    lr: float,
    settings: StepSettings,
    set_phase: SetPhase = ignore_phase,
) -> StepResult:
    """Take one optimizer step; `batch` is this rank's part of the global batch, on the device.

    `lr` is the peak learning rate, which the schedules multiply.
    Calls `set_phase` at the start of each phase: forward, backward, step.
    """
    mesh, in_backward = settings.mesh, settings.optimizer_in_backward
    set_phase("forward")  # before the all-reduce, the first call that can hang
    # Over the batch dimension only: context- and tensor-parallel ranks have the same labels.
    valid = all_reduce_sum(mesh.batch, valid_tokens(batch.labels)).clamp(min=1)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    samples = len(batch.inputs) * mesh.batch.size()  # every rank has a slice of the same size
    tokens = samples * batch.inputs.shape[1]
    progress = Progress(state.step, state.counters.tokens, tokens)
    # before backward, which may already update parameters
    scheduled_lr = state.optimizer.follow_schedule(lr, progress)
    losses = engine.forward_backward(batch, valid / scale, set_phase)
    loss, z_loss = all_reduce_sum(mesh.loss, losses) / scale
    set_phase("step")
    if in_backward:
        grad_norm, own_norms = in_backward.norms(mesh)
    else:
        parameters = state.model.parameters()
        grad_norm, own_norms = clip_gradients(
            parameters, settings.max_norm, mesh, scale, settings.adaptive_clip
        )
    # With float16 this waits for the device. All ranks have the same norm, so all decide the same.
    finite = state.loss_scale is None or bool(grad_norm.isfinite())
    if finite and not in_backward:
        state.optimizer.step()
    state.optimizer.zero_grad()
    skipped = False
    if state.loss_scale is not None:
        state.loss_scale.update(finite)
        # With an exhausted loss scale, the loop must see the overflow as a divergence.
        skipped = not finite and not state.loss_scale.exhausted
    state.counters.advance(samples, tokens)
    return StepResult(loss, z_loss, grad_norm, own_norms, scheduled_lr, tokens, skipped)
