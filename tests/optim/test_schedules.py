"""Learning rate and weight decay at named points, in steps and in tokens, and per group."""

from __future__ import annotations

import math

import pytest
from torch import nn

from titanlite.optim import (
    LR_DECAYS,
    LRSchedulerConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    RateSchedule,
    ScheduleLength,
    StepSpan,
    build_optimizer,
    build_rate_schedule,
    check_lr_scheduler_config,
    check_schedule_end,
)
from titanlite.settings import build_dataclass

STEP_TOKENS = 32


def progress(step: int, step_tokens: int = STEP_TOKENS) -> StepSpan:
    return StepSpan(step, step * step_tokens, step_tokens)


def schedule(steps=100, **section) -> RateSchedule:
    config, errors = build_dataclass(LRSchedulerConfig, section)
    assert not errors
    return build_rate_schedule(config, ScheduleLength(steps, steps * STEP_TOKENS))


def lr_factors(steps=100, **section) -> list[float]:
    return [schedule(steps, **section).lr_factor(progress(step)) for step in range(steps)]


HALF_SQRT = 1 - math.sqrt(0.5)
POINTS = [  # settings, {step: factor}; 100 steps
    ({"warmup_steps": 10}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.5, 99: 1 / 90}),
    ({"warmup_steps": 0, "decay_type": "linear"}, {0: 1.0, 50: 0.5, 75: 0.25, 100: 0.0}),
    ({"warmup_steps": 0, "decay_type": "cosine"}, {0: 1.0, 25: 0.853553, 50: 0.5, 100: 0.0}),
    ({"warmup_steps": 0, "decay_type": "sqrt"}, {0: 1.0, 25: 0.5, 50: HALF_SQRT, 100: 0.0}),
    ({"warmup_steps": 0, "min_lr_factor": 0.1}, {50: 0.55, 100: 0.1, 500: 0.1}),
    (  # warmup-stable-decay
        {"warmup_steps": 10, "decay_ratio": 0.2, "decay_type": "sqrt"},
        {9: 1.0, 50: 1.0, 80: 1.0, 85: 0.5, 90: HALF_SQRT, 100: 0.0},
    ),
    ({"warmup_steps": 10, "decay_ratio": 0.0}, {0: 0.1, 10: 1.0, 99: 1.0, 500: 1.0}),  # constant
    ({"warmup_steps": 10, "decay_ratio": 1.0}, {9: 1.0, 10: 1.0, 55: 0.5}),
    ({"warmup_steps": 0, "total_steps": 50}, {25: 0.5, 50: 0.0, 60: 0.0}),
    ({"warmup_steps": 200}, {0: 0.01, 99: 1.0}),  # limited to the schedule; as in torchtitan
    ({"total_steps": 1000}, {0: 1 / 200, 199: 1.0, 600: 0.5}),  # the default warmup
]


@pytest.mark.parametrize("section, points", POINTS, ids=str)
def test_the_learning_rate_at_named_points(section, points):
    actual = {step: schedule(**section).lr_factor(progress(step)) for step in points}
    assert actual == pytest.approx(points, abs=1e-6)


@pytest.mark.parametrize("section, points", POINTS, ids=str)
def test_with_a_constant_batch_a_schedule_in_tokens_equals_the_one_in_steps(section, points):
    in_tokens = {"warmup_tokens": STEP_TOKENS * section.get("warmup_steps", 200)}
    if "total_steps" in section:
        in_tokens["total_tokens"] = STEP_TOKENS * section["total_steps"]
    rest = {k: v for k, v in section.items() if k not in ("warmup_steps", "total_steps")}
    steps, tokens = schedule(**section), schedule(**rest, **in_tokens)
    for step in {*points, *range(120)}:
        assert tokens.lr_factor(progress(step)) == steps.lr_factor(progress(step))


def test_a_schedule_in_tokens_ignores_the_number_of_steps():
    in_tokens = schedule(warmup_tokens=320, total_tokens=3200)
    assert in_tokens.lr_factor(StepSpan(step=7, tokens=96, step_tokens=64)) == 0.5
    # The step that ends the warmup may consume more than is left of it.
    assert in_tokens.lr_factor(StepSpan(step=0, tokens=300, step_tokens=64)) == 1.0
    assert in_tokens.lr_factor(StepSpan(step=3, tokens=1760, step_tokens=64)) == 0.5


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_the_weight_decay_follows_its_own_shape(unit):
    length = {"warmup_tokens": 10 * STEP_TOKENS} if unit == "tokens" else {"warmup_steps": 10}
    for kind, half in (("linear", 0.5), ("cosine", 0.5), ("sqrt", HALF_SQRT)):
        falling = schedule(**length, weight_decay_type=kind, final_weight_decay_factor=0.2)
        rising = schedule(**length, weight_decay_type=kind, final_weight_decay_factor=10.0)
        factors = [falling.weight_decay_factor(progress(step)) for step in (0, 50, 100, 500)]
        assert factors == pytest.approx([1.0, 0.2 + 0.8 * half, 0.2, 0.2])
        factors = [rising.weight_decay_factor(progress(step)) for step in (0, 50, 100, 500)]
        assert factors == pytest.approx([1.0, 10 - 9 * half, 10.0, 10.0])
    constant = schedule(**length)
    assert {constant.weight_decay_factor(progress(step)) for step in range(120)} == {1.0}


def test_a_group_has_its_own_schedule_factor_and_weight_decay():
    groups = [
        ParameterGroupConfig(["0.weight"], lr_factor=0.5, warmup_steps=50, min_lr_factor=0.2),
        ParameterGroupConfig(
            ["0.bias"], weight_decay=0.3, weight_decay_type="linear", final_weight_decay_factor=2.0
        ),
    ]
    config = OptimizerConfig.of(groups=groups, lr=0.01, weight_decay=0.1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    section = {"warmup_steps": 10, "weight_decay_type": "linear", "final_weight_decay_factor": 0.0}
    optimizers = build_optimizer(model, config, schedule=schedule(**section))

    def rates(step: int) -> dict[str, tuple[float, float]]:
        base = optimizers.follow_schedule(progress(step))
        names = {p: name for name, p in model.named_parameters()}
        of_groups = {
            names[p]: (group["lr"], group["weight_decay"])
            for group in optimizers.param_groups
            for p in group["params"]
        }
        assert of_groups["1.weight"][0] == base
        return of_groups

    assert rates(24) == {
        "0.weight": pytest.approx((0.01 * 0.5 * 0.5, 0.1 * 0.76)),
        "0.bias": pytest.approx((0.01 * 76 / 90, 0.3 * 1.24)),
        "1.weight": pytest.approx((0.01 * 76 / 90, 0.1 * 0.76)),
    }
    assert rates(100) == {
        "0.weight": pytest.approx((0.01 * 0.5 * 0.2, 0.0)),
        "0.bias": pytest.approx((0.0, 0.6)),
        "1.weight": (0.0, 0.0),
    }
    assert rates(24) == rates(24)  # a function of the progress, whatever came before


def test_a_warmup_longer_than_the_run_is_a_warning():
    assert "warmup_steps = 200 is more than all 100" in schedule(100).warning()
    assert "warmup_tokens = 9999 is more than all 3200" in schedule(warmup_tokens=9999).warning()
    assert not schedule(200).warning()


def test_a_run_longer_than_the_schedule_is_refused_only_if_its_learning_rate_is_0():
    def problems(steps=150, **section):
        section = section if "warmup_tokens" in section else {"warmup_steps": 10, **section}
        return [*check_schedule_end(schedule(steps, **section), steps, progress(steps - 1))]

    assert problems(total_steps=100) and not problems() and not problems(total_steps=200)
    assert not problems(total_steps=100, min_lr_factor=0.1)
    assert not problems(total_steps=100, decay_ratio=0.0)  # the learning rate is constant
    (error,) = problems(warmup_tokens=0, total_tokens=4000)
    assert "0 after lr_scheduler.total_tokens = 4000" in str(error)


@pytest.mark.parametrize(
    ("section", "groups", "message"),
    [
        (
            {"warmup_tokens": 1, "total_steps": 2},
            [],
            "lr_scheduler.warmup_tokens = 1 and lr_scheduler.total_steps = 2: a schedule is in"
            " steps or in tokens, not in both.",
        ),
        ({"total_tokens": 5}, [], "the warmup has no length in tokens. Set lr_scheduler.warmup"),
        ({}, [{}, {"warmup_tokens": 3}], "groups[1].warmup_tokens = 3: the schedule of"),
        ({"warmup_tokens": 0}, [{"warmup_steps": 3}], "is in tokens. Use warmup_tokens."),
        ({"weight_decay_type": "cosine"}, [], "would be constant. Set both"),
        ({"final_weight_decay_factor": 0.5}, [], 'weight_decay_type = "constant" with final'),
        ({}, [{"final_weight_decay_factor": 0.5}], "optimizer.groups[0].weight_decay_type ="),
    ],
    ids=str,
)
def test_contradictory_settings_are_refused(section, groups, message):
    (error,) = check_lr_scheduler_config(LRSchedulerConfig(**section), groups)
    assert message in str(error) and error.keys


def test_a_schedule_of_steps_a_schedule_of_tokens_and_groups_with_their_own_are_valid():
    assert not [*check_lr_scheduler_config(LRSchedulerConfig(total_steps=9, warmup_steps=0))]
    config = LRSchedulerConfig(total_tokens=9, warmup_tokens=0)
    groups = [{"warmup_tokens": 3, "decay_type": "cosine"}]
    assert not [*check_lr_scheduler_config(config, groups)]


def test_a_new_lr_decay_is_one_line_also_for_groups_and_the_weight_decay(monkeypatch):
    monkeypatch.setitem(LR_DECAYS, "square", lambda progress: (1.0 - progress) ** 2)
    decay = {"weight_decay_type": "square", "final_weight_decay_factor": 0.0}
    new = schedule(warmup_steps=0, decay_type="square", **decay)
    assert new.lr_factor(progress(50)) == new.weight_decay_factor(progress(50)) == 0.25
    section = {"match": ["*"], "name": "SGD", "decay_type": "square"}
    _, errors = build_dataclass(ParameterGroupConfig, section)
    assert not errors
