"""One optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.models import valid_tokens
from titanlite.optim import OptimizerInBackward, clip_gradients, set_lr
from titanlite.training.engine import Engine, SetPhase, ignore_phase
from titanlite.training.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step showed, still on the device: reading it waits for the device."""

    loss: Tensor  # cross-entropy, mean over the valid tokens of the global batch, before the update
    z_loss: Tensor  # what is learned from beside it, likewise
    grad_norm: Tensor  # of the whole gradient, before clipping
    own_norms: Tensor  # [parameters of this rank], of this rank's shards of their gradients
    skipped: bool = False  # gradients overflowed float16; the next loss scale is smaller


def take_step(
    state: TrainState,
    engine: Engine,
    inputs: Tensor,
    labels: Tensor,
    *,
    mesh: Mesh,
    global_batch: int,
    lr: float,
    max_norm: float,
    early: OptimizerInBackward | None = None,
    now: SetPhase = ignore_phase,
) -> StepResult:
    """Learn from this rank's rows [rows, T] of one global batch of `global_batch` samples.

    `early` takes the step in backward. `now` is told each phase as it begins: forward, backward,
    step.
    """
    now("forward")  # already, because the first collective is this one
    # Ranks that share these rows have them whole, so each label is counted once.
    valid = all_reduce_sum(mesh.batch, valid_tokens(labels)).clamp(min=1)
    scale = 1.0 if state.loss_scale is None else state.loss_scale.value
    set_lr(state.optimizer, lr)  # before backward, where the step may be taken
    parts = engine.forward_backward(inputs, labels, valid / scale, now)
    loss, z_loss = all_reduce_sum(mesh.loss, parts) / scale
    now("step")
    if early:
        grad_norm, own_norms = early.norms(mesh)
    else:
        parameters = state.model.parameters()
        grad_norm, own_norms = clip_gradients(parameters, max_norm, mesh, scale)
    # Under float16 this waits for the device. The norm is that of all ranks, so all decide alike.
    finite = state.loss_scale is None or bool(grad_norm.isfinite())
    if finite and not early:
        state.optimizer.step()
    state.optimizer.zero_grad()
    if state.loss_scale is not None:
        state.loss_scale.update(finite)
    state.step += 1
    state.position += global_batch
    state.tokens += global_batch * inputs.shape[1]
    skipped = not finite and not state.loss_scale.exhausted
    return StepResult(loss, z_loss, grad_norm, own_norms, skipped)
