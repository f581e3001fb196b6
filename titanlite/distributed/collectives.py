"""Collectives on tensors of any device, and exchange of small values and errors.

Values are sent as JSON in byte tensors, never as pickles, so a rank executes nothing it receives.
The byte tensors are in host memory, so they use gloo even where NCCL exists. They pass along a tree
of ranks, so that the waiting time grows with the logarithm of the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import UserError, UserErrors, error_from_dict, error_to_dict
from titanlite.threads import DeviceThread

T = TypeVar("T")


def all_reduce_sum(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """Sum `value` over the ranks of a mesh, in place, one dimension after the other."""
    for dim in range(mesh.ndim):
        if mesh.size(dim) > 1:
            dist.all_reduce(value, group=mesh.get_group(dim))
    return value


def all_reduce_max(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """Take the element-wise maximum of `value` over a one-dimensional mesh, in place."""
    if mesh.size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=mesh.get_group())
    return value


# Renamed in torch 2.13, where the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_tensor(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """Stack the tensors of all ranks of a group in rank order: [ranks, *own.shape]."""
    stacked = own.new_empty(group.size() * own.numel())
    _all_gather(stacked, own.reshape(-1), group=group)
    return stacked.view(group.size(), *own.shape)


def start_all_gather(group: dist.ProcessGroup, own: Tensor) -> Callable[[], Tensor]:
    """Start `all_gather_tensor`; returns a function that waits for it and returns its result.

    What the caller computes before it waits overlaps with the communication.
    """
    stacked = own.new_empty(group.size() * own.numel())
    work = _all_gather(stacked, own.reshape(-1), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return stacked.view(group.size(), *own.shape)

    return wait


def start_all_to_all_rows(
    group: dist.ProcessGroup, rows: Tensor, sent: list[int], received: list[int]
) -> tuple[Tensor, Callable[[], object]]:
    """Start to send rows [M, ...] in rank order, `sent` to each rank.

    Returns (buffer of the rows from all ranks, `received` from each; function that waits for them).
    """
    buffer = rows.new_empty(sum(received), *rows.shape[1:])
    work = dist.all_to_all_single(buffer, rows, received, sent, group=group, async_op=True)
    return buffer, work.wait


def start_all_to_all(
    group: dist.ProcessGroup,
    sent: Sequence[Sequence[Tensor]],
    received: Sequence[Sequence[int]],
    empty: Tensor,
) -> Callable[[], list[tuple[Tensor, ...]]]:
    """Start to send each rank of a group a list of flat tensors; returns a function that waits.

    `received` has the number of elements of each tensor from each rank. The function returns these
    tensors, by rank. `empty` [0] has the dtype and device of all tensors.
    """
    sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    received_sizes = [sum(sizes) for sizes in received]
    outgoing = torch.cat([empty, *chain.from_iterable(sent)])
    incoming, wait = start_all_to_all_rows(group, outgoing, sent_sizes, received_sizes)

    def finish() -> list[tuple[Tensor, ...]]:
        wait()
        by_rank = zip(incoming.split(received_sizes), received, strict=True)
        return [tensors.split(list(sizes)) for tensors, sizes in by_rank]

    return finish


def all_to_all_tensor(group: dist.ProcessGroup, own: Tensor) -> Tensor:
    """Send entry i of `own` [ranks, ...] to rank i; returns the entries for this rank."""
    received = torch.empty_like(own, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, own.contiguous(), group=group)
    return received


def send_tensor(mesh: DeviceMesh, value: Tensor, receiver: int) -> None:
    """Send a contiguous tensor to the rank `receiver` of a one-dimensional mesh."""
    _transfer(mesh, dist.isend, value, receiver)


def receive_tensor(mesh: DeviceMesh, out: Tensor, sender: int) -> None:
    """Receive what the rank `sender` of a one-dimensional mesh sends, into a contiguous tensor."""
    _transfer(mesh, dist.irecv, out, sender)


def _transfer(mesh: DeviceMesh, operation: Callable, value: Tensor, peer: int) -> None:
    if not value.numel():  # the same on both ranks
        return
    # as torch's pipeline stages do: for a single isend, NCCL would create another communicator
    transfer = dist.P2POp(operation, value, group=mesh.get_group(), group_peer=peer)
    for work in dist.batch_isend_irecv([transfer]):
        work.wait()


def broadcast_from_rank_0(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank, as read from JSON: a tuple becomes a list."""
    tree = RankTree(group)
    return json.loads(tree.broadcast(json.dumps(value).encode() if tree.is_root else b""))


def gather_from_all_ranks(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks in rank order, on each rank, as read from JSON.

    When all of them are None, the usual case, no rank receives more than a few bytes.
    """
    tree = RankTree(group)
    (any_value,) = tree.max([value is not None])
    if not any_value:
        return [None] * tree.size
    values = [json.loads(content) for content in tree.gather(json.dumps(value).encode())]
    return broadcast_from_rank_0(values, group)


def gather_problems(problem: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The distinct problems of all ranks, each with its ranks unless all have it; "": none."""
    problems = gather_from_all_ranks(problem or None, group)
    ranks_by_problem: dict[str, list[str]] = {}
    for rank, text in enumerate(problems):
        if text:
            ranks_by_problem.setdefault(text, []).append(str(rank))
    return [
        text if len(ranks) == len(problems) else f"rank {', '.join(ranks)}: {text}"
        for text, ranks in ranks_by_problem.items()
    ]


def raise_on_all_ranks(problem: UserError | None) -> None:
    """Raise on every rank the problems of all ranks, so that no rank waits for one that failed.

    Every rank must call it at the same point, with its own problem or None.
    """
    if problems := gather_problems("" if problem is None else str(problem)):
        raise UserErrors(UserError(text) for text in problems).mark_on_all_ranks()


def capture_user_error(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    """(the function's result, None) or (None, its UserError), for `raise_on_all_ranks`."""
    try:
        return function(), None
    except UserError as error:
        return None, error


def run_on_all_ranks(function: Callable[[], T]) -> T:
    """Call `function` on every rank; return its result, or raise the UserErrors of all ranks."""
    result, problem = capture_user_error(function)
    raise_on_all_ranks(problem)
    return cast(T, result)


def run_on_rank_0(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `function` on rank 0; return its result, as JSON, or raise its UserError on all."""
    is_root = RankTree(group).is_root
    result, problem = capture_user_error(function) if is_root else (None, None)
    result, failure = broadcast_from_rank_0(
        (result, error_to_dict(problem) if problem else None), group
    )
    if failure is not None:
        raise error_from_dict(failure).mark_on_all_ranks()
    return result


class AsyncMax:
    """The maximum of a few ints over all ranks, found by a thread while a step is computed.

    Read after the step, it costs no waiting. It has its own process group, apart from others.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self._tree = RankTree(self.group)
        self._result: Future[list[int]]  # of `start`, which must come before `wait`

    def start(self, *values: int) -> None:
        """Begin; every rank must call it at the same point, with the same number of values."""
        self._result = Future()
        DeviceThread(self._run, "agreement", (values,)).start()

    def wait(self) -> list[int]:
        """Finish; returns the maximum of each value over all ranks."""
        return self._result.result()

    def _run(self, values: tuple[int, ...]) -> None:
        try:
            self._result.set_result(self._tree.max(values))
        except BaseException as error:  # raised in the thread that waits
            self._result.set_exception(error)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard as a plain tensor that shares its memory, unwrapped from any subclass."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "wait"):  # an AsyncCollectiveTensor whose collective is still running
        return local.wait()
    # Unwrap torchao's Float8 weights. is_traceable_wrapper_subclass is a private API of torch.
    # `_tensor` is private in torchao (0.18), but its __tensor_flatten__ would wait for the device:
    # it reads the value of a precomputed scale.
    while is_traceable_wrapper_subclass(local):
        inner = getattr(local, "_tensor", None)
        local = getattr(local, local.__tensor_flatten__()[0][0]) if inner is None else inner
    return local


def shard_region(
    tensor: DTensor, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, index of the first element) of the shard of the rank at a coordinate of the mesh."""
    # Private, but the only function that knows uneven and strided shards (torch 2.11 to 2.15).
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    shape, offset = _compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh.shape, list(coordinate), tensor.placements
    )
    return tuple(shape), tuple(offset)


def registered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters in a model: also the copies that its `parameters` leave out (tied.py)."""
    owned = (module.parameters(recurse=False) for module in model.modules())
    return list(dict.fromkeys(chain.from_iterable(owned)))
