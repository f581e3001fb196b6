"""Gauss-Newton-Bartlett estimates of the Hessian, for Sophia, as a part of the step."""

from __future__ import annotations

from dataclasses import replace

from titanlite.models import OutputLayer
from titanlite.models.label_sampling import sampling_keys
from titanlite.optim.sophia import Sophia
from titanlite.training.engine import Engine
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.state import TrainState
from titanlite.training.step import StepHook, StepInputs, StepResult


def hessian_hooks(engine: Engine, state: TrainState, seed: int) -> list[StepHook]:
    """The hook that estimates the Hessian for Sophia; none for other optimizers."""
    has_sophia = any(isinstance(optimizer, Sophia) for optimizer in state.optimizer)
    return [HessianEstimate(engine, state, seed)] if has_sophia else []


class HessianEstimate(StepHook):
    """In some steps, a second forward and backward with labels that the model draws itself.

    After the update: no other gradients are in memory, and it is known whether the step counts. So
    the weights are those of the next step, which uses the estimate, and the inputs those of this
    one. The gradients include those of the balancing losses of experts.
    """

    def __init__(self, engine: Engine, state: TrainState, seed: int):
        self._engine, self._state, self._seed = engine, state, seed
        self._outputs = [m for m in state.model.modules() if isinstance(m, OutputLayer)]

    def before_forward(self, inputs: StepInputs, set_phase: SetPhase) -> None:
        self._inputs, self._set_phase = inputs, set_phase

    def after_update(self, result: StepResult) -> None:
        """See `StepHook`; does not wait for the device."""
        optimizers = [o for o in self._state.optimizer if isinstance(o, Sophia)]
        due = [o for o in optimizers if self._state.step % o.frequency == 0]
        if not due:
            return
        inputs, set_phase = self._inputs, self._set_phase
        keys = sampling_keys(self._seed, inputs.own.first, inputs.batch.labels)
        self._state.optimizer.zero_grad()
        for output in self._outputs:
            output.sample_labels(True)
        batch = replace(inputs.batch, labels=keys)
        self._engine.forward_backward(batch, inputs.valid, lambda n: set_phase(f"hessian {n}"))
        for output in self._outputs:
            output.sample_labels(False)
        for optimizer in due:
            optimizer.update_hessian(inputs.valid, result.accept)
