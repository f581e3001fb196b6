"""Throughput: time per step, tokens and FLOPs per second, model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import torch

from titanlite.metrics.hardware import measure_matmul_flops, peak_memory_bytes

# Kinds of time; not the phases of the watchdog, which are parts of a step.
Phase = Literal["step", "data", "pause"]


class PhaseTimer:
    """The time that this thread has spent in one phase, by any clock."""

    def __init__(self, phase: Phase, clock: Callable[[], float]):
        self._phase, self._clock = phase, clock
        self._seconds = self._since = 0.0
        self._is_running = False

    def begin(self, phase: Phase) -> None:
        """Begin a phase; the one before it ends."""
        now = self._clock()
        if self._is_running:
            self._seconds += now - self._since
        self._since, self._is_running = now, phase == self._phase

    def take(self) -> float:
        """Seconds of the phase, of its ended spans, since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class ThroughputMeter:
    """Measures the steps since the last reading, without validation and saving.

    All time belongs to one of three phases: computing a step, waiting for its batch, or a pause. On
    a GPU the phases are those of the device, marked by events in its stream. The host waits for the
    events only in `read`; a batch that arrives while the device is still busy costs no time.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,  # forward and backward
        peak_flops: float | None,  # FLOP/s of one device in the compute dtype; None: unknown
        devices: int,
        device: torch.device,
    ):
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops  # FLOP/s
        self.devices = devices
        self.device = device
        self._clock: Any = _StreamClock() if device.type == "cuda" else _HostClock()
        self._timers: list[PhaseTimer] = []
        self._reset("pause")  # until the first batch is requested

    def _reset(self, phase: Phase) -> None:
        self._marks = [(phase, self._clock.now())]
        self._steps = self._tokens = 0

    def _begin(self, phase: Phase) -> None:
        self._marks.append((phase, self._clock.now()))
        for timer in self._timers:
            timer.begin(phase)

    def add_timers(self, timers: Iterable[PhaseTimer]) -> None:
        """Let these timers follow the phases, too."""
        self._timers.extend(timers)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for the next batch; the step begins when the block ends."""
        self._begin("data")
        try:
            yield
        finally:
            self._begin("step")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the block as work that is not part of a step: validation, saving, logging."""
        before = self._marks[-1][0]
        self._begin("pause")
        try:
            yield
        finally:
            self._begin(before)

    def step_done(self, tokens: int) -> None:
        """Count a completed step of `tokens` tokens, summed over all devices."""
        self._steps += 1
        self._tokens += tokens

    def read(self) -> dict[str, Any]:
        """Throughput and mean times per step since the last reading; resets the meter.

        A step takes `step_seconds + data_seconds`, and the throughput includes both. `mfu` is the
        model's FLOP/s as a fraction of the peak in the compute dtype
        (https://arxiv.org/abs/2204.02311, appendix B).
        """
        self._begin(self._marks[-1][0])  # ends the span that is running
        seconds = dict.fromkeys(("step", "data", "pause"), 0.0)
        for (phase, start), (_, end) in pairwise(self._marks):
            seconds[phase] += self._clock.seconds(start, end)
        steps, tokens = max(1, self._steps), self._tokens
        self._reset(self._marks[-1][0])

        tokens_per_second = tokens / max(1e-9, seconds["step"] + seconds["data"])
        flops_per_second = tokens_per_second / self.devices * self.flops_per_token
        return {
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self.devices,
            "tflops_per_device": flops_per_second / 1e12,
            "mfu": flops_per_second / self.peak_flops if self.peak_flops else None,
            "step_seconds": seconds["step"] / steps,
            "data_seconds": seconds["data"] / steps,
            "peak_memory_gib": peak_memory_bytes(self.device) / 2**30,
        }


def build_meter(
    *, flops_per_token: float, dtype: torch.dtype, devices: int, device: torch.device
) -> ThroughputMeter:
    """A meter with the device's peak in the compute dtype: published for a GPU, measured for a CPU.

    `dtype` is the compute dtype. To be called on all ranks at the same time, so that ranks on one
    CPU each measure the share of it that they have during training.
    """
    if device.type == "cuda":
        from titanlite.metrics.gpu_peaks import peak_flops

        peak = peak_flops(torch.cuda.get_device_name(device), dtype)
    else:
        peak = measure_matmul_flops(dtype, device)
    return ThroughputMeter(
        flops_per_token=flops_per_token, peak_flops=peak, devices=devices, device=device
    )


class _HostClock:
    """Takes timestamps, and computes the seconds between two of them."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _StreamClock:
    """The same for timestamps that the device takes when its stream reaches them."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000
