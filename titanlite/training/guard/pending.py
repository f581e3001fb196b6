"""Steps that the host has started, without knowing yet whether they were accepted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from titanlite.training.state import HostState
from titanlite.training.step import StepResult


@dataclass(frozen=True)
class PendingStep:
    """A judged step."""

    step: int  # counted from 1
    before: HostState
    result: StepResult
    accept: Tensor  # 0-d bool on the device


class PendingSteps:
    """The steps after the last one that the host knows to be accepted.

    A rejected step rejects the steps after it, too, so the flag of the latest step is enough. It
    is copied to the host asynchronously, one copy at a time.
    """

    def __init__(self) -> None:
        self._steps: deque[PendingStep] = deque()
        self._rejected = False
        self._flag: Tensor | None = None  # in pinned memory: whether `_flag_step` was accepted
        self._flag_step = 0
        self._flag_copied: torch.cuda.Event | None = None  # while a copy is in flight

    def add(self, step: int, before: HostState, result: StepResult) -> None:
        """Add the latest step; does not wait for the device."""
        accept = result.accept
        if accept is None:  # not judged: float16 gradients overflowed, or there is no judge
            return
        self._steps.append(PendingStep(step, before, result, accept))
        if not accept.is_cuda:
            self._settle(step, bool(accept))
        elif self._flag_copied is None:
            if self._flag is None:
                self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(accept, non_blocking=True)
            self._flag_step, self._flag_copied = step, torch.cuda.Event()
            self._flag_copied.record()

    def poll(self) -> bool:
        """Whether a rejected step is known so far; does not wait for the device."""
        if self._flag is not None and self._flag_copied is not None and self._flag_copied.query():
            self._flag_copied = None
            self._settle(self._flag_step, bool(self._flag))
        return self._rejected

    def wait(self) -> bool:
        """Whether any step so far was rejected; waits for the device."""
        if self._steps:
            self._settle(self._steps[-1].step, bool(self._steps[-1].accept))
        return self._rejected

    def take_rejected(self) -> tuple[PendingStep | None, int]:
        """(first rejected step, number of judged steps from it on); clears the pending steps."""
        rejected = [pending for pending in self._steps if not pending.accept]
        self._steps.clear()
        self._rejected, self._flag_copied = False, None
        return (rejected[0] if rejected else None), len(rejected)

    def _settle(self, step: int, accepted: bool) -> None:
        self._rejected |= not accepted
        while accepted and self._steps and self._steps[0].step <= step:
            self._steps.popleft()
