"""Mixture of experts: a feed-forward layer in which a few of many experts compute each token.

Dropless: every selected expert computes its tokens, however uneven the load. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.grouped import grouped_matmul, row_groups
from titanlite.models.decoder import FeedForward
from titanlite.models.router import ExpertSizes, Router


class GroupedExperts(nn.Module):
    """Experts (SwiGLU, https://arxiv.org/abs/2002.05202) with stacked weights."""

    def __init__(self, dim: int, sizes: ExpertSizes):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(sizes.count, dim, sizes.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, dim))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D], sorted by expert, to rows [M, D]; expert e has `counts[e]` of them."""
        return compute_experts(self.w1, self.w2, self.w3, x, counts)


def compute_experts(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The experts of local weights w1, w3 [E, F, D] and w2 [E, D, F]; see `GroupedExperts`."""
    groups = row_groups(counts, x, w1, w2, w3)
    hidden = F.silu(grouped_matmul(x, w1, groups)) * grouped_matmul(x, w3, groups)
    return grouped_matmul(hidden, w2, groups)


# Lets experts compute rows, wherever the experts are: (experts, rows, counts) starts to send this
# rank's rows [M, D], sorted by expert, to their experts. The returned function returns their
# outputs [M, D] in the same order. `counts` [E], int64 on the device: this rank's rows for each of
# all experts.
TokenDispatch = Callable[[GroupedExperts, Tensor, Tensor], Callable[[], Tensor]]


def compute_locally(experts: GroupedExperts, rows: Tensor, counts: Tensor) -> Callable[[], Tensor]:
    """The TokenDispatch of a rank that has all experts."""
    return lambda: experts(rows, counts)


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones, in place of a feed-forward layer: [B, T, D] to [B, T, D]."""

    def __init__(self, dim: int, sizes: ExpertSizes):
        super().__init__()
        self.sizes = sizes
        self.router = Router(dim, sizes)
        self.experts = GroupedExperts(dim, sizes)
        self.shared_experts = FeedForward(dim, sizes.shared_dim) if sizes.shared_dim else None
        self._dispatch: TokenDispatch = compute_locally

    def use_dispatch(self, dispatch: TokenDispatch) -> None:
        """Compute the routed experts by `dispatch`."""
        self._dispatch = dispatch

    def exclude_from_compile(self) -> None:
        """Run eagerly where the block around it is compiled."""
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        indices, weights = self.router(tokens)
        order = sort_by_expert(indices, self.sizes.count)
        rows = _CopyToRows.apply(tokens, order.tokens, order.positions)
        finish = self._dispatch(self.experts, rows, order.counts)
        # while the rows are sent
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        out = _SumOfRows.apply(finish(), weights, order.tokens, order.positions)
        return (out if shared is None else out + shared).view_as(x)


class RowOrder(NamedTuple):
    """One row for each of the k experts of each of the N tokens, sorted by expert: N*k rows."""

    tokens: Tensor  # [N*k]: the token of each row
    positions: Tensor  # [N, k]: the row of each token and expert
    counts: Tensor  # int64 [E]: rows of each expert


def sort_by_expert(indices: Tensor, experts: int) -> RowOrder:
    """The order of the rows for expert indices [N, k]; those of one expert are in token order."""
    selected = indices.flatten()
    order = selected.argsort(stable=True)
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    # not bincount, for which a GPU's host waits
    counts = selected.new_zeros(experts).scatter_add_(0, selected, torch.ones_like(selected))
    return RowOrder(order // indices.shape[1], positions.view_as(indices), counts)


class _CopyToRows(torch.autograd.Function):
    """Tokens [N, D] to rows [N*k, D]; a token's gradient sums its rows in fp32, in fixed order.

    The backward of an index would add with atomics, in the compute dtype.
    """

    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        return _sum_rows(grad, positions, None).to(grad.dtype), None, None


class _SumOfRows(torch.autograd.Function):
    """Rows [N*k, D] to tokens [N, D]: the weighted sum of a token's rows, in fp32, in fixed order.

    One slot at a time: all rows in fp32 at once would need several times the memory.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, tokens, positions)
        return _sum_rows(rows, positions, weights).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, tokens, positions = ctx.saved_tensors
        grad = grad.float()  # once: a CPU multiplies operands of two dtypes three times slower
        by_row = weights.new_empty(len(rows)).scatter_(0, positions.flatten(), weights.flatten())
        rows_grad = grad.index_select(0, tokens).mul_(by_row.unsqueeze(-1)).to(rows.dtype)
        slots = [
            (rows.index_select(0, positions[:, slot]).float() * grad).sum(-1)
            for slot in range(positions.shape[1])
        ]
        return rows_grad, torch.stack(slots, -1), None, None


def _sum_rows(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """The sum [N, D] in fp32 of the rows at positions [N, k], weighted by weights [N, k]."""
    total = rows.new_zeros((len(positions), rows.shape[1]), dtype=torch.float32)
    for slot in range(positions.shape[1]):
        selected = rows.index_select(0, positions[:, slot])
        if weights is None:
            total += selected
        else:
            total.addcmul_(selected.float(), weights[:, slot, None])
    return total
