"""What may go is never what is needed."""

from __future__ import annotations

import random

from titanlite.checkpoint.retention import steps_to_remove


def test_the_latest_stay_and_every_nth_for_ever():
    steps = [10, 20, 30, 40, 50, 60]
    assert steps_to_remove(steps, 2) == [10, 20, 30, 40]
    assert steps_to_remove(steps, 2, keep_every=20) == [10, 30]
    assert steps_to_remove(steps, 0) == [] == steps_to_remove(steps, 0, keep_every=20)


def test_whatever_is_there_the_newest_is_never_removed():
    chance = random.Random(0)
    for _ in range(500):
        steps = chance.sample(range(1, 1000), chance.randint(0, 12))
        keep, every = chance.randint(1, 5), chance.choice([0, 1, 7, 100])
        gone = set(steps_to_remove(steps, keep, every))
        assert gone <= set(steps)
        assert gone.isdisjoint(sorted(steps)[-keep:])
        assert not every or all(step % every for step in gone)
