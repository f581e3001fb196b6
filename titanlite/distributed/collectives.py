"""The few things that ranks tell each other outside of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

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


def max_over(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """The largest `value` of the ranks of a one-dimensional mesh, on each of them, in place."""
    if mesh.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group())
    return value


# Since torch 2.13 these have other names, and the old ones warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """What every rank of a group has, [ranks, *own.shape], in the order of the ranks."""
    every = own.new_empty(group.size() * own.numel())
    _gather(every, own.reshape(-1), group=group)
    return every.view(group.size(), *own.shape)


def scatter_sum(group: dist.ProcessGroup, every: Tensor) -> Tensor:
    """This rank's entry [...] of the sum over the ranks of `every` [ranks, ...]."""
    mine = every.new_empty(every[0].numel())
    _reduce_scatter(mine, every.reshape(-1), group=group)
    return mine.view(every.shape[1:])


def from_rank_0(value: T, group: dist.ProcessGroup | None = None) -> T:
    """Rank 0's value, on every rank; `group` is one of all ranks, with a timeout of its own."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def problems_of_all(problem: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """What the ranks of a group found, each once, with their numbers unless all found it.

    Every rank must call it at the same point; an empty text is no problem.
    """
    found = [problem] * dist.get_world_size(group)
    if len(found) > 1:
        dist.all_gather_object(found, problem, group=group)
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, text in enumerate(found):
        if text:
            ranks_by_problem.setdefault(text, []).append(str(rank))
    return [
        text if len(ranks) == len(found) else f"rank {', '.join(ranks)}: {text}"
        for text, ranks in ranks_by_problem.items()
    ]


def agree(problem: UserError | None) -> None:
    """Raise on every rank what any rank found, so that none is left waiting.

    Every rank must call it at the same point.
    """
    if problems := problems_of_all("" if problem is None else str(problem)):
        raise Problems(UserError(text) for text in problems).known_to_all()


def attempt(act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """What an act returns, or what the user must change; to `agree` on before going on."""
    try:
        return act(), None
    except UserError as error:
        return None, error


def on_rank_0(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do something where one rank is enough; all learn its result, or its failure.

    They wait as long as the timeout of `group` allows, which is one of all ranks.
    """
    result, problem = attempt(act) if dist.get_rank() == 0 else (None, None)
    result, problem = from_rank_0((result, problem), group)
    if problem is not None:
        raise problem.known_to_all()
    return result
