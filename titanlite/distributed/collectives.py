"""The few things that ranks tell each other outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import Problems, UserError

T = TypeVar("T")


def sum_over(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """The sum of `value` over the ranks of a one-dimensional mesh, on each of them, in place."""
    if mesh.size() > 1:
        dist.all_reduce(value, group=mesh.get_group())
    return value


def from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def agree(problem: UserError | None) -> None:
    """Raise on every rank what any rank found, naming the ranks, so that none is left waiting.

    Every rank must call it at the same point.
    """
    problems: list[str | None] = [None] * dist.get_world_size()
    if len(problems) == 1:
        problems = [None if problem is None else str(problem)]
    else:
        dist.all_gather_object(problems, None if problem is None else str(problem))
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, text in enumerate(problems):
        if text is not None:
            ranks_by_problem.setdefault(text, []).append(str(rank))
    if ranks_by_problem:
        raise Problems(
            UserError(text if len(ranks) == len(problems) else f"rank {', '.join(ranks)}: {text}")
            for text, ranks in ranks_by_problem.items()
        ).known_to_all()


def attempt(act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """What an act returns, or what the user must change; to `agree` on before going on."""
    try:
        return act(), None
    except UserError as error:
        return None, error


def on_rank_0(act: Callable[[], T]) -> T:
    """Do something where one rank is enough; all learn its result, or its failure."""
    result, problem = attempt(act) if dist.get_rank() == 0 else (None, None)
    result, problem = from_rank_0((result, problem))
    if problem is not None:
        raise problem.known_to_all()
    return result
