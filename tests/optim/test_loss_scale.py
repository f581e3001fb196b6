"""The loss scale follows what overflows, and a run that resumes goes on with the one it had."""

from __future__ import annotations

from titanlite.optim import LossScale


def test_it_is_halved_by_an_overflow_and_doubled_after_enough_steps_without_one():
    scale, seen = LossScale(1024.0, growth_steps=3), []
    for finite in (True, True, False, True, True, True, True, True, True):
        scale.update(finite)
        seen.append(scale.value)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048]


def test_it_goes_on_where_it_was():
    scale = LossScale(1024.0, growth_steps=3)
    for finite in (False, True, True):
        scale.update(finite)
    again = LossScale(1024.0, growth_steps=3)
    again.restore(scale.state())
    for each in (scale, again):
        each.update(True)
        assert each.value == 1024.0


def test_it_grows_where_a_resumed_run_asks_for_fewer_steps_than_it_has_held():
    scale = LossScale(1024.0, growth_steps=2)
    scale.restore({"value": 512.0, "held_steps": 5})
    scale.update(True)
    assert (scale.value, scale.held_steps) == (1024.0, 0)


def test_it_is_exhausted_once_the_loss_is_no_longer_scaled_up_and_still_overflows():
    scale, seen = LossScale(4.0, growth_steps=3), []
    for _ in range(3):
        scale.update(False)
        seen.append(scale.exhausted)
    assert seen == [False, False, True]
