"""What the guard decides, without processes, and after a save and a load."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from titanlite.guard.policy import (
    GuardConfig,
    History,
    StepVerdict,
    ViolationReason,
    check_guard_config,
)

NAN, SPIKE = ViolationReason.NONFINITE, ViolationReason.SPIKE
V = StepVerdict


def verdicts(config: GuardConfig, *observations: tuple, saved: bool = False) -> list:
    """The verdicts, in order; `saved`: with the history saved and loaded in between."""
    history, given = History(), []
    for observation in observations:
        given.append(history.decide(*observation, config))
        if saved:
            history = History(**json.loads(json.dumps(asdict(history))))
    return given


def at(*steps: int, reason=NAN, host=None) -> list[tuple]:
    """Replayed steps; `reason` None: the replay was no violation; `host`: it had other bits."""
    return [(step, reason, host) for step in steps]


POLICIES = {
    "nonfinite, skip": (GuardConfig(), NAN, V.SKIP),
    "nonfinite, rollback": (GuardConfig(nonfinite="rollback"), NAN, V.ROLL_BACK),
    "spike, warn": (GuardConfig(spike="warn"), SPIKE, V.ACCEPT),
    "spike, skip": (GuardConfig(spike="skip"), SPIKE, V.SKIP),
    "spike, rollback": (GuardConfig(spike="rollback"), SPIKE, V.ROLL_BACK),
    "nonfinite where spikes warn": (GuardConfig(spike="warn"), NAN, V.SKIP),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_violation_of_the_data_follows_its_policy(name):
    config, reason, verdict = POLICIES[name]
    assert verdicts(config, *at(7, reason=reason)) == [verdict]


@pytest.mark.parametrize("saved", [False, True])
def test_only_violations_in_a_row_are_counted(saved):
    config = GuardConfig(max_violations=3)
    given = verdicts(config, *at(5, 6, 8, 9, 10), saved=saved)
    assert given == [V.SKIP, V.SKIP, V.SKIP, V.SKIP, V.GIVE_UP]


def test_a_warning_never_ends_the_run():
    config = GuardConfig(spike="warn", max_violations=1)
    assert set(verdicts(config, *at(5, 6, 7, reason=SPIKE))) == {V.ACCEPT}


@pytest.mark.parametrize("saved", [False, True])
def test_hardware_faults_are_counted_by_host_and_not_as_violations(saved):
    config = GuardConfig(max_violations=2, max_hardware_faults=3)
    faults = [
        *at(1, 2, reason=None, host="a"),
        *at(3, 4, reason=None, host="b"),
        *at(5),
        *at(90, reason=None, host="a"),
    ]
    assert verdicts(config, *faults, saved=saved) == [*[V.ACCEPT] * 4, V.SKIP, V.GIVE_UP]


def test_other_bits_that_violate_again_count_as_both():
    config = GuardConfig(max_violations=9, max_hardware_faults=2)
    given = verdicts(config, *at(1, host="a"), *at(9, reason=None, host="a"))
    assert given == [V.SKIP, V.GIVE_UP]


REFUSED = {
    "spike without nonfinite": (GuardConfig(nonfinite="off", spike="warn"), False, "nonfinite"),
    "skip after an early update": (GuardConfig(spike="skip"), True, "early_step_in_backward"),
    "warn after an early update": (GuardConfig(spike="warn"), True, "early_step_in_backward"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_be_followed_are_refused(name):
    config, in_backward, part = REFUSED[name]
    (problem,) = check_guard_config(config, in_backward)
    assert part in str(problem) and "guard.spike" in problem.keys


def test_the_defaults_are_allowed_with_an_early_update():
    assert not list(check_guard_config(GuardConfig(), in_backward=True))
    assert not list(check_guard_config(GuardConfig(spike="warn"), in_backward=False))
