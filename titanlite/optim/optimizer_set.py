"""The optimizers of a run, each for some of the parameters, used as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.optim.clip import shard_norms
from titanlite.optim.conditional import ConditionalOptimizer, OverlappingOptimizer, ScalingOptimizer
from titanlite.optim.lr_schedule import UNSCHEDULED, RateSchedule, StepSpan


class WeightNorms(NamedTuple):
    """2-norms of this rank's shard of a parameter, 0-d in fp32."""

    weight: Tensor  # before the update
    update: Tensor


class UpdateNorms:
    """Measures the updates of one step after `arm`; otherwise it costs nothing.

    In that step it keeps a copy of the weights, but only while they are updated, when the
    activations are freed already.
    """

    def __init__(self) -> None:
        self._armed = False
        self._norms: dict[nn.Parameter, WeightNorms] = {}

    def arm(self) -> None:
        """Measure the updates until `take`."""
        self._armed = True

    def take(self) -> dict[nn.Parameter, WeightNorms]:
        """The norms of the parameters that were updated since `arm`."""
        norms, self._norms, self._armed = self._norms, {}, False
        return norms

    @contextmanager
    def around(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Measure what the block changes in `parameters`, if armed."""
        if not self._armed:
            yield
            return
        copies = [local_shard(parameter.detach()).clone() for parameter in parameters]
        yield
        while copies:  # freed one by one
            parameter, old = parameters[len(copies) - 1], copies.pop().float()
            (weight,) = shard_norms([old])
            (update,) = shard_norms([old.sub_(local_shard(parameter.detach()))])
            self._norms[parameter] = WeightNorms(weight, update)


# Keys of a parameter group, beside torch's own
LR_FACTOR = "lr_factor"  # multiplies the learning rate of the schedule
INITIAL_WEIGHT_DECAY = "initial_weight_decay"  # multiplied by the factor of the schedule
SCHEDULE = "schedule"  # its RateSchedule


class OptimizerSet:
    """The optimizers of a model; iterating yields them."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        peak_lr: float,
        schedule: RateSchedule = UNSCHEDULED,
    ):
        """`peak_lr` and `schedule`: those of the groups without settings of their own."""
        self._optimizers, self._peak_lr, self._schedule = tuple(optimizers), peak_lr, schedule
        self.update_norms = UpdateNorms()

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of each parameter; empty where it has none yet."""
        states = {p: state for optimizer in self for p, state in optimizer.state.items()}
        return defaultdict(dict, states)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next step in a loop without a schedule."""
        for group in self.param_groups:
            group["lr"] = lr * group[LR_FACTOR]

    def follow_schedule(self, progress: StepSpan, factor: float = 1.0) -> float:
        """Set the learning rate and the weight decay of a step in each group.

        `factor` multiplies the learning rate. Returns it before the factors of groups and of muP.
        """
        peak_lr = self._peak_lr * factor
        for group in self.param_groups:
            schedule: RateSchedule = group[SCHEDULE]
            group["lr"] = peak_lr * schedule.lr_factor(progress) * group[LR_FACTOR]
            decay_factor = schedule.weight_decay_factor(progress)
            group["weight_decay"] = group[INITIAL_WEIGHT_DECAY] * decay_factor
        return peak_lr * self._schedule.lr_factor(progress)

    def step(self, accept: Tensor | None = None, grad_factor: Tensor | None = None) -> None:
        """Update every parameter that has a gradient, with the gradient times `grad_factor` [].

        If `accept` [] is false, change no bit of weights and state. Step counters in host memory
        may advance either way: `uncount_steps` corrects them. Waits for the device only in
        optimizers that cannot decide there. Only some optimizers write the scaled gradients.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        overlapping = [o for o in self if isinstance(o, OverlappingOptimizer)]
        if grad_factor is not None:
            self._scale_gradients(grad_factor)
        with self.update_norms.around(parameters):
            completions = [optimizer.begin_step(accept) for optimizer in overlapping]
            for optimizer in [o for o in self if o not in overlapping]:
                if isinstance(optimizer, ScalingOptimizer):
                    optimizer.step_scaled(accept, grad_factor)
                elif accept is not None and isinstance(optimizer, ConditionalOptimizer):
                    optimizer.step_if(accept)
                elif accept is None or bool(accept):
                    optimizer.step()
            for complete in completions:
                complete()

    def _scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients of each optimizer that does not do it, in place."""
        groups = [g for o in self if not isinstance(o, ScalingOptimizer) for g in o.param_groups]
        grads = [local_shard(p.grad) for g in groups for p in g["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)  # one kernel for all; there is no public equivalent

    def uncount_steps(self, steps: int) -> None:
        """Subtract `steps` rejected calls of `step_if` from the step counters."""
        for optimizer in self:
            if isinstance(optimizer, ConditionalOptimizer):
                optimizer.uncount_steps(steps)

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()
