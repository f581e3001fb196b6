"""A rank that is 30 % slower than the others is named, and no rank of a healthy run."""

from __future__ import annotations

import random

import pytest
import torch

from titanlite.distributed.mesh import Degrees
from titanlite.meters.straggler import (
    StragglerMeter,
    compare_ranks,
    fastest_time,
    find_slow,
    run_self_test,
)
from titanlite.metrics import PhaseTimer, build_meter


def reports(measure: str, values: list[float]) -> list[dict]:
    """The reports of ranks that differ in one measure only."""
    normal = {"step": 2.0, "host": 1.0, "data": 0.0, "matmul": 1e-3, "memory": 1e-3}
    return [{"name": f"node{n}", **normal, measure: value} for n, value in enumerate(values)]


def named(reports: list[dict], degrees: Degrees) -> list[tuple[int, str, str]]:
    return [(s.rank, s.host, s.measure) for s in compare_ranks(reports, degrees, threshold=6.0)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 1024])
@pytest.mark.parametrize("measure", ["host", "matmul", "memory"])
def test_a_rank_that_is_30_percent_slower_is_named(ranks, measure):
    generator = random.Random(ranks)
    seconds = [generator.gauss(1.0, 0.02) for _ in range(ranks)]
    assert named(reports(measure, seconds), Degrees(shard=ranks)) == []
    seconds[ranks // 2] = 1.3
    slow = named(reports(measure, seconds), Degrees(shard=ranks))
    assert slow == [(ranks // 2, f"node{ranks // 2}", measure)]


def test_a_slow_reader_is_named_if_it_matters_for_a_step():
    waiting = reports("data", [1e-4, 2e-4, 0.01, 0.4])
    assert named(waiting, Degrees(shard=4)) == [(3, "node3", "data")]


def test_pipeline_stages_with_different_work_are_not_compared():
    host = [1.0, 1.0, 1.6, 1.6]
    assert named(reports("host", host), Degrees(shard=2, pipeline=2)) == []
    assert [rank for rank, _, _ in named(reports("host", host), Degrees(shard=4))] == [2, 3]
    host[3] = 2.1
    assert named(reports("host", host), Degrees(shard=2, pipeline=2)) == [(3, "node3", "host")]


def test_several_slow_ranks_do_not_hide_each_other():
    seconds = [1.0] * 20 + [1.3, 30.0, 1.4]
    assert [index for index, _, _ in find_slow(seconds, threshold=6.0)] == [20, 21, 22]
    assert find_slow([0.0, 0.0], threshold=6.0) == []


def test_a_phase_timer_counts_its_phase_only():
    clock = [0.0]
    meter = build_meter(
        flops_per_token=1.0, dtype=torch.float32, devices=1, device=torch.device("cpu")
    )
    step, data = (PhaseTimer(phase, lambda: clock[0]) for phase in ("step", "data"))
    meter.add_timers([step, data])
    for seconds in (1.0, 2.0):
        with meter.waiting():
            clock[0] += seconds
        clock[0] += 10 * seconds  # the step
        with meter.paused():
            clock[0] += 1000
            assert (step.take(), data.take()) == (10 * seconds, seconds)


def test_what_was_timed_before_a_roll_back_is_forgotten():
    meter = StragglerMeter(Degrees(), dict, 6.0, step=20)
    for timer in meter.timers.values():
        timer.begin("step")
        timer.begin("data")
        timer.begin("step")
        timer.begin("pause")
    meter.start(10)
    assert [timer.take() for timer in meter.timers.values()] == [0.0, 0.0, 0.0]


def test_the_self_test_takes_the_fastest_repetition():
    seconds = run_self_test(torch.float32, torch.device("cpu"))
    assert seconds.keys() == {"matmul"} and seconds["matmul"] > 0
    times = iter([0.0, 5.0, 5.0, 7.0, 7.0, 8.5, 9.0, 13.0, 20.0, 30.0])
    assert fastest_time(lambda: torch.zeros(()), lambda: next(times), repetitions=5) == 1.5
