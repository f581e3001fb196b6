"""Judge each step on the device, before the update, without waiting for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import all_reduce_min
from titanlite.training.guard.config import MIN_WINDOW_STEPS, GuardConfig
from titanlite.training.guard.history import History, ViolationReason

# Standard deviation of independent normal values, per median absolute difference of two of them.
DIFFERENCE_TO_DEVIATION = 1.4826 / math.sqrt(2)
MIN_DEVIATIONS = (0.02, 0.5)
# of the logarithm of loss and gradient norm. A loss that hardly changes has a deviation of almost
# 0. Gradient norms have heavy tails: in 20 healthy runs up to 13 times the median. With
# the default threshold a spike of the norm is above 20 times; less is clipped.


NO_HISTORY: dict[str, Any] = {"history": {}, "window": [[], []]}  # state of a judge at the start


class StepJudge:
    """Decides on the device whether each step may update the parameters.

    A rejected step rejects all later ones, until the host has handled it and calls `resume`: the
    host learns of it only some steps later, and those steps must change nothing. So a rejected
    step and the ones after it can be replayed.

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
            accept = all_reduce_min(self._tp, accept.float()) > 0
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

    def limits(self) -> tuple[float, float]:
        """Loss and gradient norm above which a step is a spike, or NaN; waits for the device."""
        loss, grad_norm = self._log_limits().exp().tolist()
        return loss, grad_norm

    def state(self) -> dict[str, Any]:
        """History and window as JSON values; waits for the device."""
        window = self._window[:, ~self._window[0].isnan()].tolist()
        return {"history": self.history.state(), "window": window}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; raises some exception if that is not valid."""
        history = History(**state["history"])
        counts = (history.last_step, history.in_a_row, *history.hardware_faults.values())
        if not all(type(count) is int for count in counts) or len(state["window"]) != 2:
            raise ValueError("is not the state of a judge")
        self.history = history
        newest = torch.tensor(state["window"])[:, -self.config.window_steps :]
        self._window.fill_(math.nan)
        self._window[:, self.config.window_steps - newest.shape[1] :] = newest

    def record(self, history: History) -> None:
        """Keep the history that `decide` returned."""
        self.history = history

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
