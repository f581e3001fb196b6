"""Schedules: what they need is said before torch would say it, and how long they idle is right."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from titanlite.errors import ConfigError
from titanlite.parallelize.schedule import (
    SCHEDULES,
    PipelineAction,
    build_schedule_order,
    format_action,
    ranks_in_order,
    ranks_of_stages,
    read_schedule_csv,
    required_microbatches,
    simulate_schedule,
)

A_RANK = {name: style.stages_a_rank or 2 for name, style in SCHEDULES.items()}


def idle(name: str, ranks: int, microbatches: int) -> float:
    """Share of the time in which a rank of equal stages does nothing."""
    stages = ranks * A_RANK[name]
    times = simulate_schedule(
        build_schedule_order(name, ranks, stages, microbatches), [1 / A_RANK[name]] * stages
    )
    span = max(timed.end for row in times for timed in row)
    return 1 - sum(t.end - t.start for row in times for t in row) / (ranks * span)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_gpipe_and_1f1b_idle_as_the_formula_says(ranks, microbatches):
    """(p - 1) / (m + p - 1): https://arxiv.org/abs/1811.06965."""
    formula = (ranks - 1) / (microbatches + ranks - 1)
    assert idle("GPipe", ranks, microbatches) == pytest.approx(formula)
    assert idle("1F1B", ranks, microbatches) == pytest.approx(formula)


def test_interleaving_and_splitting_the_backward_idle_less():
    plain = idle("1F1B", 4, 8)
    assert idle("Interleaved1F1B", 4, 8) < 0.7 * plain
    assert idle("InterleavedZeroBubble", 4, 8) < idle("Interleaved1F1B", 4, 8)
    assert idle("ZBVZeroBubble", 4, 8) < 0.5 * plain


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_microbatches_are_refused_exactly_where_torch_refuses_them(name, ranks):
    stages = ranks * A_RANK[name]
    for microbatches in range(1, 14):
        try:
            get_schedule_ops(name, ranks, microbatches, A_RANK[name])
            refused = False
        except ValueError:
            refused = True
        wanted = required_microbatches(name, ranks, stages, microbatches)
        assert (wanted is not None) == refused, microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_everything_once_on_the_rank_that_holds_it(name, tmp_path):
    ranks, microbatches = 4, 8
    order = build_schedule_order(name, ranks, ranks * A_RANK[name], microbatches)
    found, counted = ranks_in_order(tmp_path, order)  # which raises where anything is missing
    assert found == ranks_of_stages(SCHEDULES[name], ranks, ranks * A_RANK[name])
    assert counted == microbatches


def as_csv(order) -> str:
    return "\n".join(",".join(map(format_action, row)) for row in order)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_a_schedule_from_a_file_is_the_one_that_was_written(name, tmp_path):
    file = tmp_path / "schedule.csv"
    order = build_schedule_order(name, 2, 2 * A_RANK[name], 4)
    file.write_text(as_csv(order))
    assert read_schedule_csv(file) == order


@pytest.mark.parametrize(
    "text, words",
    [
        ("0F0,0B0\n1F0", "stage 1, micro-batch 0 has forward"),
        ("0F0,0B0\n1F0,1B0,1B0", "1B0 is there twice"),
        ("0F0,0B0\n1F0,1B0,0F1", "stage 0 is on lines 1 and 2"),
        ("0F0,0B0\n1B0,1F0", "would wait for ever: 0B0 and 1B0 wait"),
        ("0F0,0B0\n1F0,1I0", "stage 1, micro-batch 0 has forward, input"),
        ("0F0,zero\n1F0,1B0", 'line 1: "zero" is no action'),
        ("\n", "it is empty"),
        ("0F,0B0\n1F0,1B0", 'line 1: "0F" is no action'),
        ("0F0x9,0B0\n1F0,1B0", "is no action"),
        ("0F0,1F0,1B0,0B0\n,,", "line 2: has no stage"),
    ],
)
def test_a_file_that_would_hang_or_skip_is_refused(text, words, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        ranks_in_order(file, read_schedule_csv(file))
    assert words in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule_csv(tmp_path / "nowhere.csv")


def test_the_first_stage_does_its_whole_backward_in_the_weight_half():
    """As torch runs it; a picture that said otherwise would not be what happens."""
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
    (_, half, whole), (_, other, _) = simulate_schedule(order, [1.0, 1.0])
    assert half.end - half.start == 0 and whole.end - whole.start == 2
    assert half.start == other.end == 3
