"""The loss scale adapts to overflows, and a resumed run continues with the saved one."""

from __future__ import annotations

from titanlite.optim import LossScale


def test_an_overflow_halves_the_scale_and_growth_steps_without_one_double_it():
    scale, values = LossScale(1024.0, growth_steps=3), []
    for finite in (True, True, False, True, True, True, True, True, True):
        scale.update(finite)
        values.append(scale.value)
    assert values == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048]


def test_a_restored_scale_continues_its_count_of_steps():
    scale = LossScale(1024.0, growth_steps=3)
    for finite in (False, True, True):
        scale.update(finite)
    restored = LossScale(1024.0, growth_steps=3)
    restored.restore(scale.state())
    for each in (scale, restored):
        each.update(True)
        assert each.value == 1024.0
    restored.restore(None)  # rolled back to a checkpoint that has no loss scale
    assert restored == LossScale(1024.0, growth_steps=3)


def test_a_resumed_run_with_fewer_growth_steps_grows_at_once():
    scale = LossScale(1024.0, growth_steps=2)
    scale.restore({"value": 512.0, "held_steps": 5})
    scale.update(True)
    assert (scale.value, scale.held_steps) == (1024.0, 0)


def test_a_scale_of_1_cannot_shrink():
    scale, values = LossScale(4.0, growth_steps=3), []
    for _ in range(3):
        values.append(scale.shrinkable)
        scale.update(False)
    assert values == [True, True, False]
    scale.update(finite=False)  # as without a guard, which asks `shrinkable`
    assert scale.value == 1
