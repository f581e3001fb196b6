"""Throughput and step times, by which a user compares runs."""

from __future__ import annotations

import time

import pytest
import torch

from titanlite.metrics import ThroughputMeter, build_meter, throughput
from titanlite.metrics.throughput import _HostClock

CPU = torch.device("cpu")


def build_test_meter(peak_flops: float | None = 1e12, devices: int = 1) -> ThroughputMeter:
    return ThroughputMeter(flops_per_token=6e6, peak_flops=peak_flops, devices=devices, device=CPU)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock[0] is the time."""
    current = [100.0]
    monkeypatch.setattr(_HostClock, "now", lambda self: current[0])
    return current


def test_waiting_for_data_counts_as_data_seconds_only(clock):
    meter = build_test_meter()
    with meter.waiting():
        clock[0] += 0.5
    meter.step_done(1000)
    with meter.paused():
        read = meter.read()
    assert read["data_seconds"] == pytest.approx(0.5)
    assert read["step_seconds"] == 0


def test_validation_time_belongs_to_no_step(clock):
    meter = build_test_meter()
    for _ in range(2):  # the first pause continues after the reading
        with meter.waiting():
            clock[0] += 1
        clock[0] += 1
        meter.step_done(1000)
        with meter.paused():
            read = meter.read()
            clock[0] += 50
        assert read["step_seconds"] == pytest.approx(1)
        assert read["data_seconds"] == pytest.approx(1)
    assert read["tokens_per_second"] == pytest.approx(500)


def test_figures_cover_the_steps_since_the_last_reading(clock):
    meter = build_test_meter(devices=4)
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


def test_an_unknown_device_has_no_mfu():
    meter = build_test_meter(peak_flops=None)
    with meter.waiting():
        pass
    meter.step_done(1000)
    assert meter.read()["mfu"] is None


def test_a_pause_ends_when_its_work_raises(clock):
    meter = build_test_meter()
    with meter.waiting():
        pass
    with pytest.raises(RuntimeError), meter.paused():
        raise RuntimeError("the disk is full")
    clock[0] += 2
    meter.step_done(1000)
    assert meter.read()["step_seconds"] == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_mfu_refers_to_the_measured_peak_in_the_compute_dtype(dtype, monkeypatch):
    measured = {torch.float32: 5e12, torch.bfloat16: 1e12}
    monkeypatch.setattr(throughput, "measure_matmul_flops", lambda dtype, device: measured[dtype])
    meter = build_meter(flops_per_token=6e6, dtype=dtype, devices=1, device=CPU)
    assert meter.peak_flops == measured[dtype]


def cycles_of(seconds: float) -> int:
    """GPU cycles that keep the device busy for `seconds`."""
    for _ in range(2):  # the first one wakes the device up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(100_000_000)
        end.record()
        end.synchronize()
    return int(100_000_000 * seconds / (start.elapsed_time(end) / 1000))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_times_are_measured_on_the_device_not_the_host():
    device = torch.device("cuda")
    cycles = cycles_of(0.2)
    meter = ThroughputMeter(flops_per_token=6e6, peak_flops=None, devices=1, device=device)
    with meter.waiting():
        time.sleep(0.05)
    torch.cuda._sleep(cycles)
    meter.step_done(1000)
    with meter.paused():
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
    with meter.waiting():
        pass
    torch.cuda._sleep(cycles)
    with meter.waiting():
        time.sleep(0.05)  # while the device is busy: costs nothing
    meter.step_done(1000)
    read = meter.read()
    assert 0.1 < read["step_seconds"] < 0.35
    assert 0.02 < read["data_seconds"] < 0.045
