"""Judge each step on the device, before the update; the host learns of a rejected step later."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.guard.policy import MIN_WINDOW_STEPS, GuardConfig, History, ViolationReason
from titanlite.training.state import HostState
from titanlite.training.step import StepResult

# Standard deviation of independent normal values, per median absolute difference of two of them.
DIFFERENCE_TO_DEVIATION = 1.4826 / math.sqrt(2)
MIN_DEVIATIONS = (0.02, 0.5)
# of the logarithm of loss and gradient norm. A loss that hardly changes has a deviation of almost
# 0. Gradient norms have heavy tails: in 20 healthy runs up to 13 times the median. With
# the default threshold a spike of the norm is above 20 times; less is clipped.


class StepJudge:
    """Decides on the device whether each step may update the parameters.

    A rejected step rejects all later ones, until the host has handled it and calls `resume`: the
    host learns of it some steps later, which must change nothing, so that they can be replayed.

    A value is a spike if its logarithm is above the median of the last accepted steps by more than
    `threshold` standard deviations, estimated from the median absolute difference of consecutive
    steps. Neither follows an outlier, as mean and variance do (Leys et al. 2013,
    doi:10.1016/j.jesp.2013.03.013). Differences do not contain the trend of a falling loss.
    Deviations from the median do, and would miss early spikes of twice the loss.
    """

    def __init__(self, config: GuardConfig, device: torch.device, tp: DeviceMesh | None = None):
        """`device` of the parameters; `tp`: the tensor-parallel ranks.

        All other ranks reduce the loss and the gradient norm together, so they judge the same.
        Tensor-parallel ranks each have the whole loss, and agree on the judgement.
        """
        self.config, self.device, self.history = config, device, History()
        self._tp = tp if tp is not None and tp.size() > 1 else None
        self._accepting = torch.ones((), dtype=torch.bool, device=device)
        # [2, window_steps]: logarithms of loss and gradient norm, oldest first; NaN: none yet
        self._window = torch.full((2, config.window_steps), math.nan, device=device)
        self._min_deviations = torch.tensor(MIN_DEVIATIONS, device=device)

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether to take the step [], a bool on the device; does not wait for the device."""
        values = self._values(loss, grad_norm)
        accept = self._accepting & self._is_finite(values)
        judges_spikes = self.config.spike != "off"
        logs = _log(values) if judges_spikes else values
        if judges_spikes:
            accept &= ~self._is_spike(logs)
        if self._tp is not None:
            accept = all_reduce_sum(self._tp, (~accept).float()) == 0
        if judges_spikes:
            self._window = torch.where(accept, self._pushed(logs), self._window)
        self._accepting = accept
        return accept

    def resume(self) -> None:
        """Judge each of the following steps on its own again, after a rejected one was handled."""
        self._accepting = torch.ones_like(self._accepting)

    def accept(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Accept a step without judging it; returns true as a tensor [] on the device."""
        if self.config.spike != "off":
            self._window = self._pushed(_log(self._values(loss, grad_norm)))
        return torch.ones_like(self._accepting)

    def violation(self, loss: Tensor, grad_norm: Tensor) -> ViolationReason | None:
        """Why a step that `judge` has not seen would be rejected; waits for the device."""
        values = self._values(loss, grad_norm)
        if not self._is_finite(values):
            return ViolationReason.NONFINITE
        is_spike = self.config.spike != "off" and bool(self._is_spike(_log(values)))
        return ViolationReason.SPIKE if is_spike else None

    def limits(self) -> list[float]:
        """Loss and gradient norm above which a step is a spike, or NaN; waits for the device."""
        return self._log_limits().exp().tolist()

    def state(self) -> dict[str, Any]:
        """History and window as JSON values; waits for the device."""
        window = self._window[:, ~self._window[0].isnan()].tolist()
        return {"history": asdict(self.history), "window": window}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore what `state` returned, or the start (None); raises an exception if not valid."""
        state = {"history": {}, "window": [[], []]} if state is None else state
        history = History(**state["history"])
        counts = (history.last_step, history.in_a_row, *history.hardware_faults.values())
        if not all(type(count) is int for count in counts) or len(state["window"]) != 2:
            raise ValueError("is not the state of a judge")
        self.history = history
        newest = torch.tensor(state["window"])[:, -self.config.window_steps :]
        self._window.fill_(math.nan)
        self._window[:, self.config.window_steps - newest.shape[1] :] = newest

    def _values(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        # Under CPU offload the norm is in host memory, as are the parameters and this judge, so
        # this waits for the loss; an asynchronous copy to the host must not be read.
        return torch.stack([value.to(self.device).float() for value in (loss, grad_norm)])

    def _is_finite(self, values: Tensor) -> Tensor:
        return values.abs().amax() < math.inf  # amax of NaN is NaN

    def _is_spike(self, logs: Tensor) -> Tensor:
        return (logs > self._log_limits()).any()  # nothing is above NaN

    def _log_limits(self) -> Tensor:
        """[2]: largest logarithm of loss and gradient norm that is no spike; NaN: too few steps."""
        median = _median(self._window)
        differences = (self._window[:, 1:] - self._window[:, :-1]).abs()
        deviation = _median(differences) * DIFFERENCE_TO_DEVIATION
        limits = median + self.config.threshold * deviation.maximum(self._min_deviations)
        return torch.where(self._window[:, -MIN_WINDOW_STEPS].isnan(), math.nan, limits)

    def _pushed(self, logs: Tensor) -> Tensor:
        return torch.cat((self._window[:, 1:], logs[:, None]), 1)


def _log(values: Tensor) -> Tensor:
    return values.clamp(min=torch.finfo(torch.float32).tiny).log()  # JSON has no -inf


def _median(rows: Tensor) -> Tensor:
    """The lower median of each row without its NaN: [rows, columns] -> [rows]; NaN if all are.

    `nanmedian` with a dimension is refused on a GPU if torch's deterministic algorithms are on.
    """
    # index of the last value after sorting, which puts NaN behind all others
    last = (~rows.isnan()).sum(1, keepdim=True) - 1
    return rows.sort(1).values.gather(1, last.clamp(min=0) // 2).squeeze(1)


@dataclass(frozen=True)
class PendingStep:
    """A judged step."""

    step: int  # counted from 1
    before: HostState
    result: StepResult

    @property
    def position(self) -> int:
        """The first position that it consumed."""
        return self.before.counters.next_start(self.result.samples)


class PendingSteps:
    """The steps after the last one that the host knows to be accepted.

    A rejected step rejects the steps after it, too, so the flag of the latest step is enough. It
    is copied to the host asynchronously, one copy at a time.
    """

    def __init__(self) -> None:
        self._steps: deque[PendingStep] = deque()
        self._rejected = False
        self._copy: tuple[int, Tensor, torch.cuda.Event] | None = None
        # in flight: the step, its flag in pinned memory, and when that has arrived

    def add(self, step: int, before: HostState, result: StepResult) -> None:
        """Add the latest step; does not wait for the device."""
        accept = result.accept
        if accept is None:  # not judged: float16 gradients overflowed, or there is no judge
            return
        self._steps.append(PendingStep(step, before, result))
        if not accept.is_cuda:
            self._settle(step, bool(accept))
        elif self._copy is None:
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._copy = step, flag.copy_(accept, non_blocking=True), torch.cuda.Event()
            self._copy[2].record()

    def poll(self) -> bool:
        """Whether a rejected step is known so far; does not wait for the device."""
        if self._copy and self._copy[2].query():
            step, flag, _ = self._copy
            self._copy = None
            self._settle(step, bool(flag))
        return self._rejected

    def wait(self) -> bool:
        """Whether any step so far was rejected; waits for the device."""
        if self._steps:
            self._settle(self._steps[-1].step, bool(self._steps[-1].result.accept))
        return self._rejected

    def take_rejected(self) -> tuple[PendingStep | None, int]:
        """(first rejected step, number of judged steps from it on); clears the pending steps."""
        rejected = [pending for pending in self._steps if not pending.result.accept]
        self._steps.clear()
        self._rejected, self._copy = False, None
        return (rejected[0] if rejected else None), len(rejected)

    def _settle(self, step: int, accepted: bool) -> None:
        self._rejected |= not accepted
        while accepted and self._steps and self._steps[0].step <= step:
            self._steps.popleft()
