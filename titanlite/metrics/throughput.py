"""How fast it goes: where the time between two readings went, and what was done in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

from titanlite.metrics.hardware import measure_matmul_flops, peak_flops, peak_memory_bytes

Doing = Literal["step", "data", "pause"]


class ThroughputMeter:
    """Times of the steps since the last reading; validation and saving left out.

    Every moment belongs to one of three: computing a step, standing still for its batch, or a
    pause. On a GPU the moments are the device's, marked by events in its stream: the host, which
    runs ahead, never waits for them but in `read`, and a batch that arrives while the device is
    still busy costs nothing.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,  # forward and backward
        peak_flops: float | None,  # FLOP/s of one device
        devices: int,
        device: torch.device,
    ):
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.devices = devices
        self.device = device
        self._clock: _Clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._start_anew("pause")  # until the first batch is asked for

    def _start_anew(self, doing: Doing) -> None:
        self._marks = [(doing, self._clock.now())]
        self._steps = self._tokens = 0

    def _turn_to(self, doing: Doing) -> None:
        self._marks.append((doing, self._clock.now()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around waiting for the next batch; a step begins when it is there."""
        self._turn_to("data")
        try:
            yield
        finally:
            self._turn_to("step")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of a step: validation, saving, logging."""
        before = self._marks[-1][0]
        self._turn_to("pause")
        try:
            yield
        finally:
            self._turn_to(before)

    def step_done(self, tokens: int) -> None:
        """A step is done that learned from `tokens` tokens, counted over all devices."""
        self._steps += 1
        self._tokens += tokens

    def read(self) -> dict[str, Any]:
        """Speeds and mean times a step since the last reading; then starts anew.

        A step takes `step_seconds + data_seconds`, and the speeds count both. `mfu` is the share of
        the peak that the model's own FLOPs make use of (https://arxiv.org/abs/2204.02311, app. B).
        """
        self._turn_to(self._marks[-1][0])
        spent = dict.fromkeys(("step", "data", "pause"), 0.0)
        for (doing, start), (_, end) in pairwise(self._marks):
            spent[doing] += self._clock.seconds(start, end)
        steps, tokens = max(1, self._steps), self._tokens
        self._start_anew(self._marks[-1][0])

        speed = tokens / max(1e-9, spent["step"] + spent["data"])
        flops = speed / self.devices * self.flops_per_token
        return {
            "tokens_per_second": speed,
            "tokens_per_second_per_device": speed / self.devices,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "step_seconds": spent["step"] / steps,
            "data_seconds": spent["data"] / steps,
            "peak_memory_gib": peak_memory_bytes(self.device) / 2**30,
        }


def build_meter(
    *, flops_per_token: float, dtype: torch.dtype, devices: int, device: torch.device
) -> ThroughputMeter:
    """A meter that knows its device's peak: published for a GPU, measured now for a CPU.

    To be called on all ranks together: those that share a CPU then measure their share of it.
    """
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), dtype)
    else:
        peak = measure_matmul_flops(dtype, device)
    return ThroughputMeter(
        flops_per_token=flops_per_token, peak_flops=peak, devices=devices, device=device
    )


class _Clock(Protocol):
    """Marks moments, and tells the seconds between two of them."""

    def now(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start


class _StreamClock:
    """The moments at which the device gets to them, not those at which the host says so."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1000
