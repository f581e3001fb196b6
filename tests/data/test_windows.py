"""Windows of positions that are skipped, or trained through with a lower learning rate."""

from __future__ import annotations

import random
from itertools import islice, repeat

import pytest

from titanlite.data import PositionWindow, next_start, rank_slices, window_lr_factor

SKIPPED = (PositionWindow(40, 60), PositionWindow(60, 64), PositionWindow(100, 110, 0.5))


@pytest.mark.parametrize(
    "position, expected",
    [(0, 0), (32, 32), (33, 64), (40, 64), (63, 64), (64, 64), (96, 96), (104, 104)],
)
def test_a_step_that_would_reach_into_a_skipped_window_starts_after_it(position, expected):
    assert next_start(position, 8, SKIPPED) == expected


def test_a_window_with_a_factor_lowers_the_learning_rate_of_the_steps_that_reach_into_it():
    factors = {at: window_lr_factor(at, 8, SKIPPED) for at in (40, 92, 93, 104, 109, 110)}
    assert factors == {40: 1.0, 92: 1.0, 93: 0.5, 104: 0.5, 109: 0.5, 110: 1.0}


def test_a_run_that_continues_anywhere_under_any_ranks_reads_the_same_positions():
    source = random.Random(1)
    for _ in range(200):
        bounds = sorted(source.sample(range(300), 4))
        windows = (PositionWindow(*bounds[:2]), PositionWindow(*bounds[2:]))

        def steps(position: int, count: int, ranks: int, windows=windows) -> list[list[int]]:
            """The positions of `count` steps from `position` on, over all ranks."""
            slices = [
                islice(rank_slices(position, repeat(8), rank, ranks, windows), count)
                for rank in range(ranks)
            ]
            return [
                [at + n for at, sequences in step for n in range(sequences)]
                for step in zip(*slices, strict=True)
            ]

        straight = steps(0, 30, 1)
        skipped = {at for window in windows for at in range(window.start, window.end)}
        assert not skipped.intersection(at for step in straight for at in step)
        assert all(step == list(range(step[0], step[0] + 8)) for step in straight)
        stop = source.randrange(1, 30)
        assert steps(straight[stop - 1][-1] + 1, 30 - stop, 4) == straight[stop:]
