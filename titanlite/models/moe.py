"""Mixture of experts: a feed-forward layer in which a few of many experts compute each token.

Dropless: every selected expert computes its tokens, however uneven the load. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.kernels.grouped import Float8Cast, add_grouped_bias, grouped_matmuls, row_groups
from titanlite.models.decoder import FeedForward
from titanlite.models.router import ExpertSizes, Router, RouterGate

SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # of `clamped_swiglu`


class GroupedExperts(nn.Module):
    """Experts (SwiGLU, https://arxiv.org/abs/2002.05202) with stacked weights.

    A stack of biases is [E, N, 1], a matrix of one column for each expert.
    """

    def __init__(self, dim: int, sizes: ExpertSizes):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(sizes.count, dim, sizes.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, dim))
        self.biases = sizes.biases
        if sizes.biases:
            self.b1 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, 1))
            self.b2 = nn.Parameter(torch.empty(sizes.count, dim, 1))
            self.b3 = nn.Parameter(torch.empty(sizes.count, sizes.hidden_dim, 1))
        # or its compiled version
        self.activate: Callable[..., Tensor] = clamped_swiglu if sizes.clamped else swiglu
        self._cast: Float8Cast | None = None

    def use_float8(self, cast: Float8Cast) -> None:
        """Compute the matmuls in Float8, but for those of the gradients of weights."""
        self._cast = cast

    def forward(self, x: Tensor, counts: Tensor, local: Callable = lambda weight: weight) -> Tensor:
        """Rows [M, D], sorted by expert, to rows [M, D]; expert e has `counts[e]` of them, and
        `local` returns what this process has of a weight."""
        w1, w2, w3 = map(local, (self.w1, self.w2, self.w3))
        groups = row_groups(counts, x, w1, w2, w3)
        gate, up = grouped_matmuls(x, (w1, w3), groups, self._cast)
        if self.biases:
            gate = add_grouped_bias(gate, local(self.b1), groups)
            up = add_grouped_bias(up, local(self.b3), groups)
        (out,) = grouped_matmuls(self.activate(gate, up), (w2,), groups, self._cast)
        return add_grouped_bias(out, local(self.b2), groups) if self.biases else out

    def compile_activation(self, compile: Callable[[Callable], Callable]) -> None:
        """Compile SwiGLU. The compiler finds out that the number of rows is dynamic."""
        self.activate = compile(self.activate)
        if self._cast is not None:
            self._cast.compile(compile)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The hidden features of experts."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The hidden features of gpt-oss's experts (https://arxiv.org/abs/2508.10925, section 2.1)."""
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


# Lets experts compute rows, wherever the experts are: (experts, rows, counts) starts to send this
# rank's rows [M, D], sorted by expert, to their experts. The returned function returns their
# outputs [M, D] in the same order. `counts` [E], int64 on the device: its rows per expert.
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
        self.shared_gate = RouterGate(dim, 1, bias=False) if sizes.shared_gate else None
        self._dispatch: TokenDispatch = compute_locally
        self._compiled: Callable = lambda function: function

    def use_dispatch(self, dispatch: TokenDispatch) -> None:
        """Compute the routed experts by `dispatch`."""
        self._dispatch = dispatch

    def compile_functions(self, backend: str) -> None:
        """Compile what is computed between matmuls; the rest of the layer runs eagerly."""
        compile = partial(torch.compile, backend=backend, fullgraph=True)
        self._compiled = cache(partial(compile, dynamic=False))
        self.experts.compile_activation(compile)
        self.router.compile_functions(self._compiled)
        self.forward = torch.compiler.disable(self.forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        indices, weights = self.router(tokens)
        *order, counts = self._compiled(sort_by_expert)(indices, self.sizes.count)
        rows = _CopyToRows.apply(tokens, self._compiled, *order)
        finish = self._dispatch(self.experts, rows, counts)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)  # meanwhile
        if shared is not None and self.shared_gate is not None:
            shared = shared * self.shared_gate(tokens).sigmoid().to(shared.dtype)
        out = _SumOfRows.apply(finish(), weights, self._compiled, *order)
        return (out if shared is None else out + shared).view_as(x)


def sort_by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """M = N*k rows for expert indices [N, k], sorted by expert, then by token: (token * k + slot
    of each row [M], the row of each [N, k], rows of each expert [experts]), all int64."""
    selected = indices.flatten()
    sources = selected.argsort(stable=True)
    positions = torch.empty_like(sources)
    positions[sources] = torch.arange(len(sources), device=sources.device)
    # not bincount, for which a GPU's host waits
    counts = selected.new_zeros(experts).scatter_add_(0, selected, torch.ones_like(selected))
    return sources, positions.view_as(indices), counts


def sum_rows(rows: Tensor, positions: Tensor, weights: Tensor | None) -> Tensor:
    """The sum [N, D] of the rows [M, D] at positions [N, k] times weights [N, k], in fp32.

    One slot at a time: all rows in fp32 at once would need several times the memory.
    """
    total = rows.index_select(0, positions[:, 0]).float()
    if weights is not None:
        total *= weights[:, :1]
    for slot in range(1, positions.shape[1]):
        selected = rows.index_select(0, positions[:, slot])
        if weights is None:
            total += selected
        else:
            total.addcmul_(selected.float(), weights[:, slot, None])
    return total.to(rows.dtype)


def sum_rows_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, sources: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the weights of `sum_rows`, from that of the sum [N, D]."""
    grad = grad.float()  # once: a CPU multiplies operands of two dtypes three times slower
    by_row = weights.flatten().index_select(0, sources)
    rows_grad = grad.index_select(0, sources // positions.shape[1]).mul_(by_row.unsqueeze(-1))
    rows_grad = rows_grad.to(rows.dtype)  # frees the fp32 rows before the slots need memory
    slots = [
        (rows.index_select(0, positions[:, slot]).float() * grad).sum(-1)
        for slot in range(positions.shape[1])
    ]
    return rows_grad, torch.stack(slots, -1)


class _CopyToRows(torch.autograd.Function):
    """Tokens [N, D] to rows [M, D]. The backward of an index would add with atomics, in bf16."""

    @staticmethod
    def forward(ctx, x: Tensor, compiled: Callable, sources: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.compiled = compiled
        return x.index_select(0, sources // positions.shape[1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.compiled(sum_rows)(grad, *ctx.saved_tensors, None), None, None, None


class _SumOfRows(torch.autograd.Function):
    """Rows [M, D] to tokens [N, D]: `sum_rows`."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, compiled: Callable, *order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, *order)
        ctx.compiled = compiled
        return compiled(sum_rows)(rows, order[1], weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_grad, weights_grad = ctx.compiled(sum_rows_backward)(grad, *ctx.saved_tensors)
        return rows_grad, weights_grad, None, None, None
