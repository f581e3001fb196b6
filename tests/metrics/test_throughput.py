"""Speeds and times that a user compares runs by."""

from __future__ import annotations

import time

import pytest
import torch

from titanlite.metrics import ThroughputMeter, build_meter
from titanlite.metrics.throughput import _HostClock

CPU = torch.device("cpu")


def meter_with(peak_flops: float | None = 1e12, devices: int = 1) -> ThroughputMeter:
    return ThroughputMeter(flops_per_token=6e6, peak_flops=peak_flops, devices=devices, device=CPU)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test turns by hand: clock[0] is the time."""
    hand = [100.0]
    monkeypatch.setattr(_HostClock, "now", lambda self: hand[0])
    return hand


def test_a_slow_source_is_seen_in_data_seconds_and_nowhere_else():
    meter = meter_with()
    with meter.waiting():
        time.sleep(0.05)
    meter.step_done(1000)
    with meter.paused():
        read = meter.read()
    assert read["data_seconds"] >= 0.045
    assert read["step_seconds"] < 0.02


def test_a_validation_is_not_in_the_time_of_any_step():
    meter = meter_with()
    for _ in range(2):  # the pause reaches over the first reading
        with meter.waiting():
            pass
        meter.step_done(1000)
        with meter.paused():
            read = meter.read()
            time.sleep(0.05)
        assert read["step_seconds"] < 0.02 and read["data_seconds"] < 0.02
    assert read["tokens_per_second"] > 1000 / 0.04


def test_speeds_and_times_are_those_of_the_steps_since_the_last_reading(clock):
    meter = meter_with(devices=4)
    clock[0] += 60  # building the model
    for step_seconds, tokens in ((1.0, 1000), (3.0, 3000)):
        for _ in range(2):
            with meter.waiting():
                clock[0] += 0.5
            clock[0] += step_seconds
            meter.step_done(tokens)
            with meter.paused():
                clock[0] += 10
        with meter.paused():
            clock[0] += 10
            read = meter.read()
            clock[0] += 10
        assert read["step_seconds"] == pytest.approx(step_seconds)
        assert read["data_seconds"] == pytest.approx(0.5)
        speed = tokens / (step_seconds + 0.5)
        assert read["tokens_per_second"] == pytest.approx(speed)
        assert read["tokens_per_second_per_device"] == pytest.approx(speed / 4)
        assert read["tflops_per_device"] == pytest.approx(speed / 4 * 6e6 / 1e12)
        assert read["mfu"] == pytest.approx(speed / 4 * 6e6 / 1e12)  # the peak is 1e12
    assert read["peak_memory_gib"] > 0.01


def test_an_unknown_device_has_no_mfu_rather_than_a_wrong_one():
    meter = meter_with(peak_flops=None)
    with meter.waiting():
        pass
    meter.step_done(1000)
    assert meter.read()["mfu"] is None


def test_a_pause_that_ends_in_an_error_is_over(clock):
    meter = meter_with()
    with meter.waiting():
        pass
    with pytest.raises(RuntimeError), meter.paused():
        raise RuntimeError("the disk is full")
    clock[0] += 2
    meter.step_done(1000)
    assert meter.read()["step_seconds"] == pytest.approx(2)


def test_the_peak_of_a_cpu_is_measured():
    meter = build_meter(flops_per_token=6e6, dtype=torch.float32, devices=1, device=CPU)
    assert 1e8 < meter.peak_flops < 1e14


def cycles_of(seconds: float) -> int:
    """How many cycles keep the device busy for so long."""
    for _ in range(2):  # the first one wakes the device up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
    return int(100_000_000 * seconds / (start.elapsed_time(end) / 1000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_times_are_the_devices_although_the_host_runs_ahead():
    device = torch.device("cuda")
    fifth = cycles_of(0.2)
    meter = ThroughputMeter(flops_per_token=6e6, peak_flops=None, devices=1, device=device)
    with meter.waiting():
        time.sleep(0.05)
    torch.cuda._sleep(fifth)
    meter.step_done(1000)
    with meter.paused():
        torch.cuda._sleep(fifth)
        torch.cuda.synchronize()
    with meter.waiting():
        pass
    torch.cuda._sleep(fifth)
    with meter.waiting():
        time.sleep(0.05)  # while the device is busy: costs nothing
    meter.step_done(1000)
    read = meter.read()
    assert 0.1 < read["step_seconds"] < 0.35
    assert 0.02 < read["data_seconds"] < 0.045
