"""The few things that ranks tell each other outside of the model.

Values travel as JSON in tensors of bytes, never as pickles: a rank executes nothing that it
receives. The tensors are in host memory, so that they use gloo beside NCCL too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import UserError, UserErrors, error_from_dict, error_to_dict

T = TypeVar("T")

MESSAGE_BYTES = 64 << 20  # most that a rank accepts as one value: far more than any value here


def all_reduce_sum(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """The sum of `value` over the ranks of a one-dimensional mesh, on each of them, in place."""
    if mesh.size() > 1:
        dist.all_reduce(value, group=mesh.get_group())
    return value


def all_reduce_max(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """The largest `value` of the ranks of a one-dimensional mesh, on each of them, in place."""
    if mesh.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group())
    return value


# Since torch 2.13 these have other names, and the old ones warn.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_tensor(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """What every rank of a group has, [ranks, *own.shape], in the order of the ranks."""
    every = own.new_empty(group.size() * own.numel())
    _gather(every, own.reshape(-1), group=group)
    return every.view(group.size(), *own.shape)


def reduce_scatter_sum(group: dist.ProcessGroup, every: Tensor) -> Tensor:
    """This rank's entry [...] of the sum over the ranks of `every` [ranks, ...]."""
    mine = every.new_empty(every[0].numel())
    _reduce_scatter(mine, every.reshape(-1), group=group)
    return mine.view(every.shape[1:])


def broadcast_from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's value, on every rank, as JSON gives it back: a tuple becomes a list.

    Raises TypeError or ValueError where the value is not JSON.
    """
    if dist.get_world_size() == 1:
        return json.loads(json.dumps(value))
    own = _to_bytes(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor(own.numel())
    dist.broadcast(size, src=0, group=group)
    if dist.get_rank() != 0:
        own = torch.empty(_checked(size.item()), dtype=torch.uint8)
    dist.broadcast(own, src=0, group=group)
    return _from_bytes(own)


def gather_from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group in their order, on each of them, as JSON gives them back.

    Where all of them are None, which is usual, it is one collective of a few bytes.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [json.loads(json.dumps(value))]
    own = torch.empty(0, dtype=torch.uint8) if value is None else _to_bytes(value)
    sizes = torch.empty(ranks, dtype=torch.int64)
    _gather(sizes, torch.tensor([own.numel()]), group=group)
    longest = _checked(int(sizes.max()))
    if not longest:
        return [None] * ranks
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    every = torch.empty(ranks * longest, dtype=torch.uint8)
    _gather(every, padded, group=group)
    return [
        _from_bytes(row[:size]) if size else None
        for row, size in zip(every.view(ranks, longest), sizes.tolist(), strict=True)
    ]


def _to_bytes(value: Any) -> Tensor:
    text = json.dumps(value).encode()
    _checked(len(text))
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def _from_bytes(tensor: Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def _checked(size: int) -> int:
    if not 0 <= size <= MESSAGE_BYTES:
        raise ValueError(f"a value of {size} bytes between ranks; at most {MESSAGE_BYTES} are sent")
    return size


def gather_problems(problem: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """What the ranks of a group found, each once, with their numbers unless all found it.

    Every rank must call it at the same point; an empty text is no problem.
    """
    found = gather_from_all_ranks(problem or None, group)
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, text in enumerate(found):
        if text:
            ranks_by_problem.setdefault(text, []).append(str(rank))
    return [
        text if len(ranks) == len(found) else f"rank {', '.join(ranks)}: {text}"
        for text, ranks in ranks_by_problem.items()
    ]


def raise_on_all_ranks(problem: UserError | None) -> None:
    """Raise on every rank what any rank found, so that none is left waiting.

    Every rank must call it at the same point.
    """
    if problems := gather_problems("" if problem is None else str(problem)):
        raise UserErrors(UserError(text) for text in problems).mark_on_all_ranks()


def capture_user_error(act: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """What an act returns, or what the user must change; to `raise_on_all_ranks` on before going on."""
    try:
        return act(), None
    except UserError as error:
        return None, error


def run_on_rank_0(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do something where one rank is enough; all learn its result, or its failure.

    The result has to be JSON, and arrives as `broadcast_from_rank_0` says.
    """
    result, problem = capture_user_error(act) if dist.get_rank() == 0 else (None, None)
    result, failure = broadcast_from_rank_0(
        (result, error_to_dict(problem) if problem else None), group
    )
    if failure is not None:
        raise error_from_dict(failure).mark_on_all_ranks()
    return result


class AsyncMax:
    """A few whole numbers from every rank, and the largest of each for all, while they compute.

    Asked before a step and answered after it, agreeing costs no waiting. The group is its own, so
    that nothing else meets in it.
    """

    def __init__(self):
        self.group = dist.new_group(backend="gloo")

    def start(self, *own: int) -> None:
        """Every rank calls it at the same point, with as many numbers."""
        self._numbers = torch.tensor(own)
        self._work = dist.all_reduce(
            self._numbers, dist.ReduceOp.MAX, group=self.group, async_op=True
        )

    def wait(self) -> list[int]:
        """The largest of each number of any rank."""
        self._work.wait()
        return self._numbers.tolist()
