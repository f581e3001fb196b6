"""What the ranks agree on in each step; a stop between two steps, or within a slow one."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch

from titanlite.training.run import Run


class StepAbandoned(Exception):
    """All ranks give up a step, whose end torchrun would not wait for."""


class AgreedFlags(NamedTuple):
    """What holds on any rank, as all ranks know it after a step."""

    is_saving: bool  # still writing the last checkpoint
    lost_folder: bool  # may no longer write to the run's folders
    is_rejected: bool  # the guard knows of a rejected step
    is_saving_in_memory: bool  # cannot begin the next memory checkpoint


class RankAgreement:
    """The agreement of all ranks, in each step, on whether the run stops, and on `AgreedFlags`.

    The ranks exchange their flags while the device computes, so that no rank waits for it. Call
    `begin_step`, `before_compute`, then `begin_phase` for each phase, and `end_step`.
    """

    def __init__(self, run: Run):
        self._run, self._max_over_ranks = run, run.max_over_ranks
        self._timer = _IterationTimer()
        # Whether torchrun may kill a signalled rank before two steps and a save have ended, but not
        # before a save alone. Then the ranks agree on stops within a step too: waits for the GPU.
        can_abandon = run.stop_request.limit_seconds is not None
        self._max_over_ranks.start(run.stop_request.reason(0.0), can_abandon)
        self.reason, any_can_abandon = self._max_over_ranks.wait()
        self._can_abandon = bool(any_can_abandon)
        self._agreed: list[int] | None = None  # before the step was computed

    def begin_step(self, lost_folder: bool, is_rejected: bool) -> None:
        """Start to exchange the stop reason and the flags of this rank."""
        request, save_seconds = self._run.stop_request, self._run.checkpointer.save_seconds
        reason = request.reason(self._timer.start_iteration() + save_seconds)
        limit, two_steps = request.limit_seconds, 2 * self._timer.step_seconds
        is_slow = limit is not None and save_seconds < limit < two_steps + save_seconds
        saves = self._run.checkpointer
        in_memory = saves.memory is not None and saves.memory.writing
        flags = (saves.writing, lost_folder, is_rejected, in_memory)
        self._max_over_ranks.start(reason, is_slow, *flags)

    def before_compute(self) -> None:
        """Wait for the exchange if this step may be abandoned: only one can be in flight."""
        self._agreed = self._max_over_ranks.wait() if self._can_abandon else None

    def begin_phase(self, phase: str) -> None:
        """Begin a phase of a step; raise StepAbandoned if its end comes too late for a signal.

        The ranks agree on it before each micro-batch, and in a pipeline before each run of the
        schedule: until the update, the parameters are those of the step before.
        """
        if not phase.startswith("forward"):
            return
        self._timer.start_forward()
        if self._can_abandon and self._run.step_settings.optimizer_in_backward is None:
            self.reason, is_too_slow = self._agree_to_stop()
            if is_too_slow:
                raise StepAbandoned

    def end_step(self) -> AgreedFlags:
        """Set `reason`, and return the flags of all ranks."""
        self._timer.step_done()
        agreed = self._agreed or self._max_over_ranks.wait()
        reason, is_slow, *flags = agreed
        self.reason = max(reason, self._agree_to_stop()[0] if self._agreed else 0)
        self._can_abandon = bool(is_slow)
        return AgreedFlags(*map(bool, flags))

    def _agree_to_stop(self) -> list[int]:
        """[signal, whether the step would end too late to save it] on any rank."""
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)  # the host runs ahead
        request, save_seconds = self._run.stop_request, self._run.checkpointer.save_seconds
        is_too_slow = self._timer.step_seconds_left + save_seconds > request.seconds_left
        self._max_over_ranks.start(request.received, is_too_slow)
        return self._max_over_ranks.wait()


class _IterationTimer:
    """Estimates the time that the next iterations take, so that a run stops before its deadline."""

    def __init__(self) -> None:
        self._started, self._iterations, self._longest = time.monotonic(), 0, 0.0
        self.step_seconds = math.inf  # of the latest step, without the actions after it
        # forward phases begun in this step, and those of the latest one
        self._forwards, self._forwards_of_step = 0, 0

    def start_forward(self) -> None:
        """Count a forward phase of the step."""
        self._forwards += 1

    def step_done(self) -> None:
        """The step of this iteration has been computed."""
        self.step_seconds = time.monotonic() - self._started
        self._forwards_of_step, self._forwards = self._forwards, 0

    @property
    def step_seconds_left(self) -> float:
        """Until the step of this iteration ends, if its parts take as long as in the latest one."""
        if self.step_seconds == math.inf:
            return math.inf
        return self.step_seconds * (1 - (self._forwards - 1) / max(self._forwards_of_step, 1))

    def start_iteration(self) -> float:
        """Start an iteration; returns the seconds to reserve for it and the next one.

        A decision to stop takes effect at the end of the iteration in which it is made. So the
        duration of the latest iteration is reserved, plus that of the longest one, which may
        include a validation. The first iteration compiles and does not count as the longest.
        """
        now = time.monotonic()
        latest, self._started = now - self._started, now
        if self._iterations > 1:
            self._longest = max(self._longest, latest)
        self._iterations += 1
        return latest + self._longest
