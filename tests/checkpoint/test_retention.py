"""Retention never removes a checkpoint that is needed."""

from __future__ import annotations

import random

from titanlite.checkpoint.step_folders import steps_to_remove


def test_the_latest_checkpoints_and_those_of_every_nth_step_are_kept():
    steps = [10, 20, 30, 40, 50, 60]
    assert steps_to_remove(steps, 2) == [10, 20, 30, 40]
    assert steps_to_remove(steps, 2, keep_every=20) == [10, 30]
    assert steps_to_remove(steps, 0) == [] == steps_to_remove(steps, 0, keep_every=20)


def test_the_newest_checkpoints_are_never_removed():
    random_source = random.Random(0)
    for _ in range(500):
        steps = random_source.sample(range(1, 1000), random_source.randint(0, 12))
        keep, every = random_source.randint(1, 5), random_source.choice([0, 1, 7, 100])
        removed = set(steps_to_remove(steps, keep, every))
        assert removed <= set(steps)
        assert removed.isdisjoint(sorted(steps)[-keep:])
        assert not every or all(step % every for step in removed)
