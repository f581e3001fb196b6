"""Which loss and gradient norm the judge accepts, and what its window remembers."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import pytest
import torch

from titanlite.guard.judge import StepJudge
from titanlite.guard.policy import GuardConfig, ViolationReason

CPU = torch.device("cpu")
SPIKES = GuardConfig(spike="skip")


def healthy(steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """A loss that falls to 3 with noise, and a heavy-tailed gradient norm."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steps, 2, generator=generator).tolist()
    return [
        (3 + 4 * math.exp(-step / 60) + 0.05 * a, 0.8 * math.exp(0.25 * b))
        for step, (a, b) in enumerate(noise)
    ]


def judge_all(judge: StepJudge, values: list[tuple[float, float]]) -> list[int]:
    """Indices of the rejected values; each is handled at once, as by the host."""
    rejected = []
    for number, (loss, norm) in enumerate(values):
        if not judge.judge(torch.tensor(loss), torch.tensor(norm)):
            rejected.append(number)
            judge.resume()
    return rejected


def test_ten_spikes_of_mixed_sizes_are_caught_and_no_healthy_step():
    values = healthy(500)
    spikes = {
        40: (12.0, 0.8), 75: (3.9, 60.0), 120: (1e6, 0.8), 121: (50.0, 0.8), 180: (4.5, 0.8),
        240: (3.0, 1e9), 300: (30.0, 30.0), 301: (5.0, 0.8), 400: (4.0, 0.8), 499: (6.0, 1.0),
    }  # fmt: skip
    for at, spike in spikes.items():
        values[at] = spike
    assert judge_all(StepJudge(SPIKES, CPU), values) == sorted(spikes)


def test_an_outlier_hides_no_later_one():
    values = healthy(300)
    values[150], values[160] = (1e6, 0.8), (50.0, 0.8)
    assert judge_all(StepJudge(SPIKES, CPU), values) == [150, 160]


def test_a_warned_outlier_that_enters_the_window_hides_no_later_one():
    judge = StepJudge(SPIKES, CPU)
    assert judge_all(judge, healthy(200)) == []
    for outlier in (1e6, 1e6, 1e6):
        judge.accept(torch.tensor(outlier), torch.tensor(0.8))
    assert judge_all(judge, [(50.0, 0.8), (3.0, 0.8)]) == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", [GuardConfig(), SPIKES], ids=["no spikes", "spikes"])
def test_inf_and_nan_are_always_rejected_and_enter_no_window(value, config):
    judge = StepJudge(config, CPU)
    flat = healthy(400)[320:]
    values = [*flat[:40], (value, 0.8), (3.0, value), *flat[40:]]
    assert judge_all(judge, values) == [40, 41]
    assert torch.tensor(judge.state()["window"]).isfinite().all()
    assert judge.violation(torch.tensor(value), torch.tensor(1.0)) is ViolationReason.NONFINITE


def test_without_a_policy_for_spikes_any_finite_value_is_accepted():
    assert judge_all(StepJudge(GuardConfig(), CPU), [*healthy(40), (1e30, 1e30)]) == []


def test_nothing_is_a_spike_before_the_window_has_16_values():
    assert judge_all(StepJudge(SPIKES, CPU), [*healthy(15), (500.0, 0.8)]) == []
    assert judge_all(StepJudge(SPIKES, CPU), [*healthy(16), (500.0, 0.8)]) == [16]


@pytest.mark.parametrize(("which", "floor", "noise"), [(0, 0.02, 3), (1, 0.5, 4)])
def test_the_limit_follows_from_the_median_and_the_differences_of_the_window(which, floor, noise):
    judge = StepJudge(GuardConfig(spike="warn", window_steps=31), CPU)
    values = [(loss ** (noise * loss / 3), norm**noise) for loss, norm in healthy(100)]
    for loss, norm in values:
        judge.accept(torch.tensor(loss), torch.tensor(norm))
    logs = [math.log(pair[which]) for pair in values[-31:]]
    median = statistics.median(logs)
    differences = sorted(abs(b - a) for a, b in pairwise(logs))
    deviation = 1.4826 * differences[(len(differences) - 1) // 2] / math.sqrt(2)
    assert deviation > floor
    assert judge.limits()[which] == pytest.approx(math.exp(median + 6.0 * deviation), rel=1e-5)


def test_all_steps_after_a_rejected_one_are_rejected_until_the_host_resumes():
    judge = StepJudge(SPIKES, CPU)
    judge_all(judge, healthy(40))
    before = judge.state()
    given = [bool(judge.judge(torch.tensor(x), torch.tensor(0.8))) for x in (math.nan, 3.0, 3.0)]
    assert given == [False, False, False]
    assert judge.state() == before
    judge.resume()
    assert judge.judge(torch.tensor(3.0), torch.tensor(0.8))


@pytest.mark.parametrize("window_steps", [128, 64, 256])
def test_a_resumed_run_judges_as_the_uninterrupted_one(window_steps):
    values = healthy(300)
    values[250] = (8.0, 0.8)
    first = StepJudge(SPIKES, CPU)
    judge_all(first, values[:200])
    resumed = StepJudge(GuardConfig(spike="skip", window_steps=window_steps), CPU)
    resumed.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    assert judge_all(resumed, values[200:]) == judge_all(first, values[200:]) == [50]
    if window_steps == 128:
        assert resumed.state() == first.state()
