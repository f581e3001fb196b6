"""Being asked to stop: by a signal to any one rank, or by the clock."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
TIME_IS_UP = 1 << 10  # beside the numbers of signals


@dataclass
class StopRequest:
    """Whether this rank was asked to stop; what a run does about it is decided by all together."""

    deadline: float | None = None  # by time.monotonic()
    received: int = field(default=0, init=False)  # the signal that came

    def listen(self) -> None:
        """From now on a signal is a request to save and leave, no longer the end."""
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def reason(self, seconds_needed: float) -> int:
        """Nonzero if it is time to stop, where leaving in order takes so many seconds."""
        if self.deadline is not None and time.monotonic() + seconds_needed >= self.deadline:
            return TIME_IS_UP
        return self.received

    def _remember(self, number: int, frame) -> None:
        self.received = number


def words_for(reason: int) -> str:
    """Why a run stopped, for people."""
    return "time_limit" if reason == TIME_IS_UP else signal.Signals(reason).name


class Council:
    """A few whole numbers from every rank, and the largest of each for all, while they compute.

    Asked before a step and answered after it, agreeing costs no waiting. The group is its own, so
    that nothing else meets in it.
    """

    def __init__(self):
        self.group = dist.new_group(backend="gloo")

    def ask(self, *own: int) -> None:
        """Every rank calls it at the same point, with as many numbers."""
        self._numbers = torch.tensor(own)
        self._work = dist.all_reduce(
            self._numbers, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def answer(self) -> list[int]:
        """The largest of each number of any rank."""
        self._work.wait()
        return self._numbers.tolist()
