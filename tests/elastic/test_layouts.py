"""The layout for the ranks that are present, and the sequences of each rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.test_job import error_text, read_valid
from titanlite.data import rank_slices
from titanlite.elastic.rows import RankSlice, rank_rows, read_with_idle
from titanlite.job import read_job
from titanlite.labels import IGNORE_INDEX

ELASTIC = ("--elastic.enable=true",)
ODD = "{ ranks = 3, tensor_parallel_degree = 4 }"
TENSOR = (*ELASTIC, "--parallelism.tensor_parallel_degree=2")
LISTED = (
    *ELASTIC,
    "--elastic.layouts=[{ ranks = 2, local_batch_size = 8 },"
    " { ranks = 6, tensor_parallel_degree = 2 }]",
)


@pytest.mark.parametrize(
    ("argv", "ranks", "layout", "cost"),
    [
        (ELASTIC, 1, "one process", "1 of 1 ranks work, 0 wait as spares; 0.0% of the sequences"),
        (ELASTIC, 3, "FSDP 3", "33.3% of the sequences are idle; on 4 or 2 ranks nothing is"),
        (ELASTIC, 11, "FSDP 8", "8 of 11 ranks work, 3 wait as spares; 50.0% of the sequences"),
        (TENSOR, 7, "FSDP 3 x TP 2", "6 of 7 ranks work, 1 wait as spares; 33.3% of the"),
        (LISTED, 7, "FSDP 3 x TP 2", "6 of 7 ranks work"),
        (LISTED, 5, "FSDP 2", "3 wait as spares; 50.0% of the sequences are idle; on no number of"),
    ],
)
def test_the_layout_is_that_of_the_ranks_that_are_present(run_toml, argv, ranks, layout, cost):
    job = read_valid(run_toml, *argv, ranks=ranks)
    assert str(job.degrees) == layout and cost in job.cost
    assert f"  elastic    {job.cost}\n" in job.summary(torch.device("cpu"), None)
    again = run_toml.with_name("again.toml")
    again.write_text(job.as_toml())  # as it was configured, so it can start on other ranks
    on_others = read_job(["--job.config_file", str(again)], 2)
    assert on_others.degrees == read_valid(run_toml, *argv, ranks=2).degrees


@pytest.mark.parametrize(
    ("argv", "ranks", "message"),
    [
        (TENSOR, 1, "1 ranks are too few; the least is 2. Start 2 ranks or more, or set elastic"),
        (LISTED, 1, "1 ranks are too few; the least is 2."),
        ((*ELASTIC, "--training.global_batch_size=-1"), 2, "depends on the layout. Set training"),
        ((*ELASTIC, "--parallelism.data_parallel_shard_degree=2"), 1, "the least is 2. Start 2"),
        (
            (*ELASTIC, f"--elastic.layouts=[{{ ranks = 2 }}, {ODD}]"),
            2,
            "elastic.layouts of 3 ranks: parallelism: tensor_parallel_degree 4 does not divide",
        ),
        (
            (*ELASTIC, "--parallelism.expert_parallel_degree=32"),
            2,
            "expert_parallel_degree = 32: does not divide the 1 ranks that it is borrowed from",
        ),
    ],
)
def test_what_does_not_suit_the_ranks_is_refused_with_the_fix(run_toml, argv, ranks, message):
    assert message in error_text(run_toml, *argv, ranks=ranks)


@pytest.mark.parametrize(("batch", "ranks"), [*itertools.product([7, 24], range(1, 9))])
def test_each_sequence_of_a_batch_is_computed_once_and_idle_ones_have_no_labels(batch, ranks):
    tokens, seen = torch.arange(5 + batch)[:, None], []
    for rank in range(ranks):
        first, sequences = next(rank_slices(5, [batch], rank, ranks))
        rows = rank_rows(batch, ranks, 3)
        inputs, labels = read_with_idle(
            lambda at, count: (tokens[at : at + count], tokens[at : at + count]),
            *(first, sequences, rows),
        )
        own = RankSlice(first, sequences, batch)
        parts = [own.part(start, 3) for start in range(0, rows, 3)]
        assert sum(part.sequences for part in parts) == sequences == (labels >= 0).sum()
        assert inputs.shape == labels.shape == (rows, 1) and inputs.min() >= 5
        assert (labels[sequences:] == IGNORE_INDEX).all()
        seen += labels[:sequences].flatten().tolist()
    assert seen == list(range(5, 5 + batch))
