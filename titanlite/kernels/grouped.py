"""Grouped matmul: rows sorted by expert, each group of rows times the matrix of its expert.

One kernel on a GPU that has one for the dtype and the sizes, and one matmul per expert elsewhere.
On a CPU, where torch's grouped kernel is such a loop too, ours accepts every dtype and size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_ALIGNMENT = 16  # bytes: the strides of all operands of the grouped kernel are multiples
KERNEL_MAJORS = (9, 10)  # compute capabilities of the kernel: Hopper, and Blackwell of data centers
# On others F.grouped_mm is a loop too, for which the host waits at every call instead of once a
# layer (_grouped_mm_cuda in GroupedBlas.cpp, https://github.com/pytorch/pytorch/issues/186620).
KERNEL_GROUPS = 1023  # the most that the kernel computes (GroupMM.cu)


class RowGroups(NamedTuple):
    """How many rows each expert has; their sum is the number of rows."""

    on_host: Tensor | None  # int64 [E]; None: not copied, because the kernel does not need it
    ends: Tensor  # int32 [E] on the device: the row after the last one of each expert
    is_empty: Tensor  # bool [E] on the device


def row_groups(counts: Tensor, x: Tensor, *weights: Tensor) -> RowGroups:
    """The groups of `counts` [E], for grouped matmuls of `x` by one of `weights` after the other.

    A weight is [E, out, in]. Without a grouped kernel for them, the host waits for the device once.
    """
    ends = counts.cumsum(0, dtype=torch.int32)
    uses_kernel = len(x) > 0 and has_grouped_kernel(x, *weights)  # it rejects a sum over no rows
    return RowGroups(None if uses_kernel else counts.cpu(), ends, counts == 0)


def has_grouped_kernel(x: Tensor, *weights: Tensor) -> bool:
    """Whether torch has a grouped kernel for these operands (2.11 to 2.15)."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] not in KERNEL_MAJORS:
        return False
    if any(tensor.dtype != torch.bfloat16 for tensor in (x, *weights)):
        return False
    if any(len(weight) > KERNEL_GROUPS for weight in weights):
        return False
    sizes = [size for weight in weights for size in weight.shape[1:]]
    return not any(size * x.element_size() % KERNEL_ALIGNMENT for size in sizes)


def grouped_matmul(x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
    """Rows x [M, K], sorted by expert, times the transposed weights [E, N, K]: [M, N].

    The gradient of the weights of an expert without rows is zero.
    """
    if groups.on_host is None:
        return _KernelMatmul.apply(x, weight, groups.ends, groups.is_empty)
    return _loop_matmul(x, weight, groups.on_host)


def add_grouped_bias(rows: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
    """Rows [M, N], sorted by expert, plus the bias [E, N, 1] of their expert.

    It is a matmul of a one in each row, so that its gradient is one too: a sum over the rows of an
    expert that is accurate in a low precision, and the same in each run. Zeros align the strides.
    """
    zeros = KERNEL_ALIGNMENT // rows.element_size() - 1
    ones = F.pad(rows.new_ones(len(rows), 1), (0, zeros))
    return rows + grouped_matmul(ones, F.pad(bias, (0, zeros)), groups)


# --- one kernel ----------------------------------------------------------------------------------


class _KernelMatmul(torch.autograd.Function):
    """F.grouped_mm, whose own backward does not promise zeros for an expert without rows."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor, is_empty: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends, is_empty)
        return F.grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends, is_empty = ctx.saved_tensors
        grad, x_grad, weight_grad = grad.contiguous(), None, None
        if ctx.needs_input_grad[0]:
            x_grad = F.grouped_mm(grad, weight, offs=ends)
        if ctx.needs_input_grad[1]:
            weight_grad = F.grouped_mm(grad.mT, x, offs=ends)
            weight_grad.masked_fill_(is_empty.view(-1, 1, 1), 0)  # a sum over no rows
        return x_grad, weight_grad, None, None


# --- one matmul per expert -----------------------------------------------------------------------
# Custom operators, so that a traced graph has one node for the loop, and fake tensors work.


def _slices(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for each expert; `counts` is in host memory."""
    end = 0
    for expert, count in enumerate(counts.tolist()):
        start, end = end, end + count
        yield expert, slice(start, end)


def _rounded(count: int, x: Tensor) -> int:
    """The number of rows to compute for `count` rows: at most 16, or one sixteenth, more.

    On a CPU, matmuls of 16-bit dtypes are oneDNN's, which generates a kernel for each new number of
    rows: 1.2 ms, as long as five matmuls of 128 rows take. Few numbers of rows need few kernels.
    """
    if x.device.type != "cpu" or x.element_size() > 2:
        return count
    step = max(16, (1 << count.bit_length()) // 32)
    return -(-count // step) * step


def _pad(rows: Tensor) -> Tensor:
    """The rows, and zeros up to the rounded number of rows."""
    return F.pad(rows, (0, 0, 0, _rounded(len(rows), rows) - len(rows)))


@torch.library.custom_op("titanlite::grouped_matmul", mutates_args=())
def _loop_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, rows in _slices(counts):
        count = rows.stop - rows.start
        more = slice(rows.start, rows.start + _rounded(count, x))
        if count and more.stop <= len(x):  # the experts after it overwrite what is not its own
            torch.mm(x[more], weight[expert].mT, out=out[more])
        elif count:
            out[rows] = torch.mm(_pad(x[rows]), weight[expert].mT)[:count]
    return out


@torch.library.custom_op("titanlite::grouped_weight_grad", mutates_args=())
def _loop_weight_grad(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """[E, N, K]: grad [M, N], transposed, times x [M, K], over the rows of each expert."""
    out = x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])
    for expert, rows in _slices(counts):
        if rows.stop > rows.start:
            torch.mm(_pad(grad[rows]).mT, _pad(x[rows]), out=out[expert])
        else:
            out[expert].zero_()
    return out


@_loop_matmul.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_loop_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _loop_backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    x_grad = _loop_matmul(grad, weight.mT, counts) if needs_x else None
    weight_grad = _loop_weight_grad(grad, x, counts) if needs_weight else None
    return x_grad, weight_grad, None


_loop_matmul.register_autograd(
    _loop_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
