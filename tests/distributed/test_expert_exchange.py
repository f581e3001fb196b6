"""The exchange of tokens between experts: any counts, any degrees, the results of one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.mesh import Degrees, build_mesh
from titanlite.parallelize.token_exchange import start_exchange

EXPERTS, DIM, HIDDEN = 4, 3, 4


def weights() -> tuple[Tensor, Tensor]:
    """[E, F, D] and [E, D, F]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((EXPERTS, HIDDEN, DIM), (EXPERTS, DIM, HIDDEN))
    first, second = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return first, second


def rows_of(rank: int, counts: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(sum(counts), DIM, generator=generator, dtype=torch.float64)


def apply_experts(rows: Tensor, counts: Tensor, first: Tensor, second: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([(p @ a.T).tanh() @ b.T for p, a, b in zip(parts, first, second, strict=True)])


def exchange_and_compute(degrees: Degrees, all_counts: list[list[int]]):
    """(result, gradient of the rows, own experts, gradients of their weights) of this rank."""
    mesh = build_mesh(degrees, "cpu").experts.exchange
    rank = mesh.get_local_rank()
    own = slice(*(EXPERTS // mesh.size() * n for n in (rank, rank + 1)))
    first, second = (weight[own].requires_grad_() for weight in weights())
    rows = rows_of(rank, all_counts[rank]).requires_grad_()
    finish = start_exchange(
        mesh.get_group(),
        lambda x, n: apply_experts(x, n, first, second),
        rows,
        torch.tensor(all_counts[rank]),
    )
    result = finish()
    (result * result.detach()).sum().backward()
    return result.detach(), rows.grad, own, first.grad, second.grad


UNEVEN = [[1, 2, 0, 5], [0, 0, 3, 1], [4, 0, 0, 0], [2, 2, 2, 2]]
EMPTY = [[0, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0], [0, 0, 0, 1]]  # most ranks send nothing


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("counts", [UNEVEN, EMPTY], ids=["uneven", "empty"])
def test_results_and_gradients_are_those_of_one_process(ranks, counts):
    degrees = Degrees(shard=ranks, expert=ranks)
    results = run_on_ranks(exchange_and_compute, ranks, degrees, counts[:ranks])
    first, second = (weight.requires_grad_() for weight in weights())
    for rank, (result, rows_grad, *_) in enumerate(results):
        rows = rows_of(rank, counts[rank]).requires_grad_()
        expected = apply_experts(rows, torch.tensor(counts[rank]), first, second)
        (expected * expected.detach()).sum().backward()
        torch.testing.assert_close(result, expected.detach())
        torch.testing.assert_close(rows_grad, rows.grad)
    for *_, own, first_grad, second_grad in results:
        torch.testing.assert_close(first_grad, first.grad[own])
        torch.testing.assert_close(second_grad, second.grad[own])
