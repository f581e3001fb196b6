"""Grouped matmul: rows sorted by expert, each group of rows times the matrix of its expert.

One kernel on a GPU that has one for the dtype and the sizes, and one matmul per expert elsewhere.
On a CPU, where torch's grouped kernel is such a loop too, ours accepts every dtype and size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_ALIGNMENT = 16  # bytes: the strides of all operands of the grouped kernel are multiples
KERNEL_MAJORS = (9, 10)  # compute capabilities of the kernel: Hopper, and Blackwell of data centers
# On others F.grouped_mm is a loop too, for which the host waits at every call instead of once a
# layer (_grouped_mm_cuda in GroupedBlas.cpp, https://github.com/pytorch/pytorch/issues/186620).
KERNEL_GROUPS = 1023  # the most that the kernel computes (GroupMM.cu)
FLOAT8_CAPABILITY = (9, 0)  # torch compiles this kernel for Hopper only (ScaledGroupMM.cu)


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
    return grouped_matmuls(x, (weight,), groups)[0]


def grouped_matmuls(
    x: Tensor, weights: tuple[Tensor, ...], groups: RowGroups, cast: Float8Cast | None = None
) -> tuple[Tensor, ...]:
    """`grouped_matmul` of the same rows by each of the weights.

    With a cast, outputs and the gradient of x are computed in Float8. The gradients of the weights
    are not: for them, torch's kernel needs in each group rows, in a multiple of 16.
    """
    return _GroupedMatmuls.apply(x, groups, cast or (lambda operand: operand), *weights)


def add_grouped_bias(rows: Tensor, bias: Tensor, groups: RowGroups) -> Tensor:
    """Rows [M, N], sorted by expert, plus the bias [E, N, 1] of their expert.

    It is a matmul of a one in each row, so that its gradient is one too: a sum over the rows of an
    expert that is accurate in a low precision, and the same in each run. Zeros align the strides.
    """
    zeros = KERNEL_ALIGNMENT // rows.element_size() - 1
    ones = F.pad(rows.new_ones(len(rows), 1), (0, zeros))
    return rows + grouped_matmul(ones, F.pad(bias, (0, zeros)), groups)


# --- Float8 --------------------------------------------------------------------------------------


def scale_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] in Float8 (e4m3), and what to multiply its rows by to get x again: [..., 1], fp32.

    Powers of two round nothing. So a rank that has a part of each row rounds its values as one that
    has all of it, except for values that are below 2^-14 of the largest one.
    """
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-30)  # a row may be zero
    exponents = (largest / torch.finfo(torch.float8_e4m3fn).max).log2().ceil()
    data = (x.float() * (-exponents).exp2()).to(torch.float8_e4m3fn)
    return data.contiguous(), exponents.exp2()


class Float8Cast:
    """Casts operands [..., K] of matmuls that sum over K, with a scale for each row.

    `emulate`: back to their dtype, which has all Float8 values, so that any kernel multiplies them.
    """

    def __init__(self, emulate: bool):
        self._emulate, self._scale_rows = emulate, scale_rows

    def compile(self, compile: Callable[..., Callable]) -> None:
        """Compile the cast for a GPU: one kernel for rows, two for weights that it transposes."""
        compiled = compile(scale_rows, dynamic=False)

        def scale(x: Tensor) -> tuple[Tensor, Tensor]:
            if x.dim() == 2:  # how many rows a rank has changes from step to step
                torch._dynamo.maybe_mark_dynamic(x, 0)
            return compiled(x)

        if not self._emulate:
            self._scale_rows = scale

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        data, scales = self._scale_rows(x)
        return (data.float() * scales).to(x.dtype) if self._emulate else (data, scales.squeeze(-1))


def _multiply_groups(x: Any, weight: Any, groups: RowGroups, *, fast: bool) -> Tensor:
    """Cast operands to [M, N]; `fast`: sums of Float8 may have less than the precision of fp32."""
    if isinstance(x, tuple):
        (x, x_scales), (weight, weight_scales) = x, weight
        if len(x) == 0:
            return x.new_empty(0, weight.shape[1], dtype=torch.bfloat16)
        kernel, rows = F.scaled_grouped_mm, F.ScalingType.RowWise  # type: ignore[attr-defined]
        scales = x_scales, rows, weight_scales, rows
        return kernel(x, weight.mT, *scales, offs=groups.ends, use_fast_accum=fast)
    if groups.on_host is None:
        return F.grouped_mm(x, weight.mT, offs=groups.ends)
    return _loop_matmul(x, weight, groups.on_host)


def _weight_grad(grad: Tensor, x: Tensor, groups: RowGroups) -> Tensor:
    """[E, N, K]: grad [M, N], transposed, times x [M, K], over the rows of each expert."""
    if groups.on_host is not None:
        return _loop_weight_grad(grad, x, groups.on_host)
    out = F.grouped_mm(grad.mT, x, offs=groups.ends)
    return out.masked_fill_(groups.is_empty.view(-1, 1, 1), 0)  # of a sum over no rows, it is not


class _GroupedMatmuls(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, groups: RowGroups, cast: Callable, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *groups, *weights)
        ctx.cast = cast
        rows = cast(x)
        return tuple(_multiply_groups(rows, cast(weight), groups, fast=True) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, on_host, ends, is_empty, *weights = ctx.saved_tensors
        groups, cast, x_grad = RowGroups(on_host, ends, is_empty), ctx.cast, None
        needs_x, _, _, *needs_weights = ctx.needs_input_grad
        grads = tuple(grad.contiguous() for grad in grads)
        for grad, weight in zip(grads, weights, strict=True) if needs_x else ():
            summand = _multiply_groups(cast(grad), cast(weight.mT), groups, fast=False)
            x_grad = summand if x_grad is None else x_grad + summand
        weight_grads = (
            _weight_grad(grad, x, groups) if needed else None
            for grad, needed in zip(grads, needs_weights, strict=True)
        )
        return x_grad, None, None, *weight_grads


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
