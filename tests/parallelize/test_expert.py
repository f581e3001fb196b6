"""Degrees that do not fit the experts are refused, with the keys to change."""

from __future__ import annotations

import pytest

from titanlite.distributed.mesh import Degrees, ParallelismConfig, resolve_degrees
from titanlite.errors import ConfigError
from titanlite.models import ExpertSizes
from titanlite.parallelize.expert import check_expert_parallel

EXPERTS = ExpertSizes(count=6, active=2, hidden_dim=20, shared_dim=9)


@pytest.mark.parametrize(
    "degrees, experts, reason",
    [
        (Degrees(shard=2, expert=2), None, "the model has no experts"),
        (Degrees(shard=4, expert=4), EXPERTS, "does not divide the 6 experts"),
        (Degrees(tensor=3), EXPERTS, "does not divide the hidden width of an expert, 20"),
        (Degrees(tensor=2, expert=2), EXPERTS, "hidden width of the shared experts, 9"),
        (Degrees(tensor=3, expert=3), EXPERTS, None),  # an expert has 20 rows on one rank
        (Degrees(), None, None),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(degrees, experts, reason):
    errors = [str(error) for error in check_expert_parallel(degrees, experts)]
    assert len(errors) == (reason is not None)
    assert reason is None or reason in errors[0]


@pytest.mark.parametrize(
    "expert, expert_tensor, reason",
    [
        (3, 1, "does not divide the 8 ranks that it is borrowed from"),
        (8, 2, "does not divide the 4 ranks that it is borrowed from"),
        (2, 4, "must be 1 or parallelism.tensor_parallel_degree = 2"),
    ],
)
def test_ranks_that_cannot_be_borrowed_are_refused(expert, expert_tensor, reason):
    section = ParallelismConfig(
        tensor_parallel_degree=2,
        context_parallel_degree=2,
        expert_parallel_degree=expert,
        expert_tensor_parallel_degree=expert_tensor,
    )
    with pytest.raises(ConfigError, match=reason) as refused:
        resolve_degrees(section, 8)
    assert str(refused.value).startswith("parallelism.expert_")


def test_experts_borrow_their_ranks():
    degrees = Degrees(replicate=2, shard=4, tensor=2, expert=4)
    assert (degrees.ranks, degrees.expert_shard) == (16, 2)
    assert str(degrees) == "replicate 2 x FSDP 4 x TP 2 (experts: FSDP 2 x EP 4)"
