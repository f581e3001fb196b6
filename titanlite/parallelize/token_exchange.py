"""Expert parallel, the communication: send tokens to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.collectives import all_to_all_tensor, start_all_to_all_rows
from titanlite.models.router import keep_for_recompute

# rows [M, D], sorted by local expert, and rows per local expert [E / ep] -> [M, D]
Compute = Callable[[Tensor, Tensor], Tensor]


def start_exchange(
    group: dist.ProcessGroup, compute: Compute, rows: Tensor, counts: Tensor
) -> Callable[[], Tensor]:
    """Start to send rows [M, D] to the ranks of a group that have their experts.

    The rows are sorted by expert, `counts` [E] of them each; ranks have equal numbers of experts.

    The returned function waits for the rows of the other ranks, computes on them, and returns the
    results [M, D] in the order of `rows`. What the caller computes in between overlaps with the
    communication, in backward too. The host waits once, for the sizes; a recomputation has them.
    """
    by_rank = counts.view(group.size(), -1)  # [ep, E / ep]
    local_counts = keep_for_recompute(lambda: all_to_all_tensor(group, by_rank))  # own experts
    sent, received = keep_for_recompute(lambda: read_row_numbers(len(rows), by_rank, local_counts))
    dispatch, combine = _RowExchange(group, sent, received), _RowExchange(group, received, sent)
    arriving = _StartRowExchange.apply(rows, dispatch)

    def finish() -> Tensor:
        order, inverse = _order_by_expert(local_counts, sum(received))
        arrived = _FinishRowExchange.apply(arriving, dispatch)
        results = compute(_Permute.apply(arrived, order, inverse), local_counts.sum(0))
        returning = _StartRowExchange.apply(_Permute.apply(results, inverse, order), combine)
        return _FinishRowExchange.apply(returning, combine)

    return finish


def read_row_numbers(rows: int, *counts: Tensor) -> list[list[int]]:
    """The sum of each row of `counts`, on the host; `rows` is for traces, which have no values."""
    return torch.stack([each.sum(1) for each in counts]).cpu().tolist()


def _order_by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order that sorts received rows by expert, and its inverse.

    The rows are sorted by rank, then by expert: `counts` [ep, E / ep] of them each. It is stable.
    """
    ranks, experts = counts.shape
    numbers = torch.arange(experts, device=counts.device).repeat(ranks)
    order = numbers.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(rows, device=order.device)
    return order, inverse


class _RowExchange:
    """An all-to-all of rows in two halves, which are autograd functions.

    Backward runs them in reverse: `_StartRowExchange` waits for what `_FinishRowExchange` starts.
    So what lies between them overlaps with the communication in backward too.
    """

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]):
        self._group, self._sent, self._received = group, sent, received
        self._pending: list[tuple[Tensor, Callable[[], object]]] = []

    def send(self, rows: Tensor, *, back: bool) -> Tensor:
        """Start a transfer, to the other ranks or back; returns its buffer."""
        sizes = (self._received, self._sent) if back else (self._sent, self._received)
        self._pending.append(start_all_to_all_rows(self._group, rows.contiguous(), *sizes))
        return self._pending[-1][0]

    def wait(self) -> Tensor:
        """Wait for the transfer that was started last; returns its buffer."""
        buffer, wait = self._pending.pop()
        wait()
        return buffer


class _StartRowExchange(torch.autograd.Function):
    """The buffer that the rows arrive in; not to be read before `_FinishRowExchange`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.send(rows, back=False)

    @staticmethod
    def backward(ctx: Any, unused: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait(), None


class _FinishRowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, exchange: _RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait().view_as(buffer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.send(grad, back=True)
        return grad, None  # autograd requires the shape of the buffer; _StartRowExchange ignores it


class _Permute(torch.autograd.Function):
    """Rows in another order; backward gathers too, where that of indexing would add atomically."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
