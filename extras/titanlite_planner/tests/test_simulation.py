"""The simulation of pipeline schedules has the bubbles of their papers."""

from __future__ import annotations

import pytest

from titanlite.parallelize.schedule import SCHEDULES, PipelineAction, build_schedule_order
from titanlite_planner.time.simulation import simulate_schedule

STAGES_PER_RANK = {name: schedule.stages_per_rank or 2 for name, schedule in SCHEDULES.items()}


def bubble_fraction(name: str, ranks: int, microbatches: int) -> float:
    """Fraction of the time in which a rank is idle, if all stages cost the same."""
    stages = ranks * STAGES_PER_RANK[name]
    order = build_schedule_order(name, ranks, stages, microbatches)
    rows = simulate_schedule(order, [1 / STAGES_PER_RANK[name]] * stages)
    span = max(timed.end for row in rows for timed in row)
    return 1 - sum(timed.end - timed.start for row in rows for timed in row) / (ranks * span)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_bubbles_match_the_formula(ranks, microbatches):
    """(p - 1) / (m + p - 1): https://arxiv.org/abs/1811.06965."""
    formula = (ranks - 1) / (microbatches + ranks - 1)
    assert bubble_fraction("GPipe", ranks, microbatches) == pytest.approx(formula)
    assert bubble_fraction("1F1B", ranks, microbatches) == pytest.approx(formula)


def test_interleaving_and_splitting_the_backward_reduce_the_bubble():
    one_f_one_b = bubble_fraction("1F1B", 4, 8)
    assert bubble_fraction("Interleaved1F1B", 4, 8) < 0.7 * one_f_one_b
    assert bubble_fraction("InterleavedZeroBubble", 4, 8) < bubble_fraction("Interleaved1F1B", 4, 8)
    assert bubble_fraction("ZBVZeroBubble", 4, 8) < 0.5 * one_f_one_b


def test_the_first_stage_computes_its_entire_backward_in_the_weight_half():
    """As torch does; otherwise the drawn timeline would be wrong."""
    order = [
        [
            PipelineAction("forward", 0, 0),
            PipelineAction("input", 0, 0),
            PipelineAction("weight", 0, 0),
        ],
        [
            PipelineAction("forward", 1, 0),
            PipelineAction("input", 1, 0),
            PipelineAction("weight", 1, 0),
        ],
    ]
    (_, input_half, weight_half), (_, next_stage, _) = simulate_schedule(order, [1.0, 1.0])
    assert input_half.end - input_half.start == 0 and weight_half.end - weight_half.start == 2
    assert input_half.start == next_stage.end == 3
