"""Pipeline schedules: requirements are checked before torch runs, and files before they hang."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from titanlite.errors import ConfigError
from titanlite.parallelize.schedule import (
    SCHEDULES,
    _from_torch_action,
    assign_stages,
    build_schedule_order,
    check_csv_order,
    format_action,
    read_schedule_csv,
    required_microbatches,
)

V_OR_SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.splits_backward]
STAGES_PER_RANK = {name: schedule.stages_per_rank or 2 for name, schedule in SCHEDULES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_microbatch_counts_are_rejected_exactly_where_torch_rejects_them(name, ranks):
    stages = ranks * STAGES_PER_RANK[name]
    for microbatches in range(1, 14):
        try:
            get_schedule_ops(name, ranks, microbatches, STAGES_PER_RANK[name])
            rejected = False
        except ValueError:
            rejected = True
        required = required_microbatches(name, ranks, stages, microbatches)
        assert (required is not None) == rejected, microbatches


@pytest.mark.parametrize("microbatches, nearest", [(9, "8 or 10"), (13, "12 or 15")])
def test_an_uneven_number_of_microbatches_is_rejected_with_the_nearest_that_work(
    microbatches, nearest
):
    required = required_microbatches("Interleaved1F1B", 4, 8, microbatches)
    assert required == f"{nearest} (the nearest n with n % (n // 4) = 0)"
    for count in nearest.split(" or "):
        get_schedule_ops("Interleaved1F1B", 4, int(count), 2)  # raises if torch rejects it


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_each_action_once_on_the_rank_of_its_stage(name, tmp_path):
    ranks, microbatches = 4, 8
    order = build_schedule_order(name, ranks, ranks * STAGES_PER_RANK[name], microbatches)
    rank_of, counted = check_csv_order(tmp_path, order)  # raises if an action is missing
    assert rank_of == assign_stages(SCHEDULES[name], ranks, ranks * STAGES_PER_RANK[name])
    assert counted == microbatches


@pytest.mark.parametrize("per_rank, microbatches", [(2, 8), (3, 8), (2, 16), (3, 12)])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", *V_OR_SPLIT])
def test_an_order_is_the_one_that_torch_runs(name, per_rank, microbatches):
    per_rank = SCHEDULES[name].stages_per_rank or per_rank
    rows = get_schedule_ops(name, 4, microbatches, per_rank)
    of_torch = [[action for cell in row for action in _from_torch_action(cell)] for row in rows]
    assert build_schedule_order(name, 4, 4 * per_rank, microbatches) == of_torch


def as_csv(order) -> str:
    return "\n".join(",".join(map(format_action, row)) for row in order)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_a_schedule_survives_a_round_trip_through_csv(name, tmp_path):
    file = tmp_path / "schedule.csv"
    order = build_schedule_order(name, 2, 2 * STAGES_PER_RANK[name], 4)
    file.write_text(as_csv(order))
    assert read_schedule_csv(file) == order


@pytest.mark.parametrize(
    "text, message",
    [
        ("0F0,0B0\n1F0", "stage 1, micro-batch 0 has forward"),
        ("0F0,0B0\n1F0,1B0,1B0", "1B0 is listed twice"),
        ("0F0,0B0\n1F0,1B0,0F1", "stage 0 is on pipeline ranks 0 and 1"),
        ("0F0,0B0\n1B0,1F0", "would deadlock: 0B0 and 1B0 cannot start"),
        ("0F0,0B0\n1F0,1I0", "stage 1, micro-batch 0 has forward, input"),
        ("0F0,zero\n1F0,1B0", 'line 1: "zero" is not an action'),
        ("0F0,0B0\n\n1F0,zero", 'line 3: "zero" is not an action'),
        ("\n", "it is empty"),
        ("0F,0B0\n1F0,1B0", 'line 1: "0F" is not an action'),
        ("0F0x9,0B0\n1F0,1B0", "is not an action"),
        ("0F0,1F0,1B0,0B0\n,,", "line 2: has no action"),
        ("0F0,0B0\n0F9999999999", '"0F9999999999" is not an action'),  # it would fill the memory
    ],
)
def test_a_csv_schedule_that_would_hang_or_skip_work_is_rejected(text, message, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        check_csv_order(file, read_schedule_csv(file))
    assert message in str(raised.value)


def test_a_missing_csv_schedule_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule_csv(tmp_path / "nowhere.csv")
