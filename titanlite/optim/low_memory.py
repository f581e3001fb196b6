"""Adam and AdamW with low-memory moments: fewer bits per element, in host memory or on a disk.

A moment in 8 or 4 bits is a code per element and a scale per block of a row. Blocks are defined on
the global shape, never on a shard, so every layout computes the same numbers. A checkpoint stores
codes and scales as plain tensors, so any layout reads them back bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import local_shard
from titanlite.distributed.disk_memory import in_pages
from titanlite.distributed.host_memory import pin_in_place
from titanlite.optim.conditional import ConditionalBase, write_if
from titanlite.optim.disk_moments import DiskMoments, MomentPiece
from titanlite.optim.fp32_vectors import is_low_vector
from titanlite.optim.shards import sharded_zeros

StateDtype = Literal["float32", "bfloat16", "8bit", "4bit", "float8"]

BLOCKS = (128, 64, 32)  # elements that share one scale
CODE_BITS = {"8bit": 8, "4bit": 4, "float8": 8}
UNQUANTIZED = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MomentFormat:
    """Storage format of the moments of one parameter."""

    dtype: StateDtype
    block: int = 0  # elements that share one scale; 0: not quantized

    @property
    def names(self) -> list[str]:
        """Names in the optimizer's state. Each quantized format has its own, so that a checkpoint
        of one format is never read as another."""
        if not self.block:
            return ["exp_avg", "exp_avg_sq"]
        moments = (f"exp_avg_{self.dtype}", f"exp_avg_root_{self.dtype}")
        return [name for moment in moments for name in (moment, f"{moment}_scale")]


def moment_format(shape: Iterable[int], dtype: StateDtype) -> MomentFormat:
    """The format of the moments of a global shape; vectors and odd rows stay float32."""
    if dtype in UNQUANTIZED:
        return MomentFormat(dtype)
    *rows, width = shape
    block = gcd(width, BLOCKS[0])
    return MomentFormat(dtype, block) if rows and block in BLOCKS else MomentFormat("float32")


def moment_bytes(shape: Iterable[int], dtype: StateDtype) -> int:
    """Bytes of both moments of a parameter of this shape."""
    shape = tuple(shape)
    storage, elements = moment_format(shape, dtype), torch.Size(shape).numel()
    if not storage.block:
        return 2 * elements * UNQUANTIZED[storage.dtype].itemsize
    return 2 * (elements * CODE_BITS[dtype] // 8 + elements // storage.block * 4)


@dataclass(frozen=True)
class MomentOptions:
    """How LowMemoryAdam stores and updates its moments."""

    dtype: StateDtype = "float32"
    offload: bool = False  # in host memory, copied to the device one parameter at a time
    offload_folder: str = ""  # with offload: in a file in this folder
    compiled: bool = True
    # one kernel per update; false: one per operation, with memory for the intermediate results


class LowMemoryAdam(ConditionalBase):
    """Adam or AdamW (https://arxiv.org/abs/1711.05101), with moments in the format `moments`."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,  # weight decay: AdamW's, not Adam's
        moments: MomentOptions | None = None,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.moments, self.decoupled = moments or MomentOptions(), decoupled
        self._update = _compiled_update() if self.moments.compiled else _update
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._disk: DiskMoments | None = None
        if self.moments.offload and self.moments.offload_folder:
            own = ((local_shard(p), p.shape[-1], self._specs(p)) for p in parameters)
            sizes = (s.numel() * w // width * d.itemsize for s, width, p in own for w, d in p)
            device_type = local_shard(parameters[0]).device.type
            nbytes = sum(map(in_pages, sizes))
            self._disk = DiskMoments(self.moments.offload_folder, device_type, nbytes)
        for parameter in parameters:
            self.state[parameter] = self._initial_state(parameter)
        if self.moments.offload:  # copies back to the host may be under way when state is read
            self.register_state_dict_pre_hook(_synchronize_device)

    def _specs(self, parameter: nn.Parameter) -> list[tuple[int, torch.dtype]]:
        """(length of a row, dtype) of each moment."""
        dtype = self.moments.dtype
        storage, width = moment_format(parameter.shape, dtype), parameter.shape[-1]
        if not storage.block:
            # float32 means the dtype of the weights, as in torch's own optimizers
            as_weights = dtype == "float32" and not is_low_vector(parameter)
            moment = (width, parameter.dtype if as_weights else UNQUANTIZED[storage.dtype])
            return [moment, moment]
        assert local_shard(parameter).shape[-1] % storage.block == 0, "checked at startup"
        codes = (width * CODE_BITS[dtype] // 8, torch.uint8)
        return [codes, (width // storage.block, torch.float32)] * 2

    def _initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        names = moment_format(parameter.shape, self.moments.dtype).names
        state = {"step": torch.tensor(0.0)}
        for name, spec in zip(names, self._specs(parameter), strict=True):
            state[name] = _allocate_moment(parameter, *spec, self.moments.offload, self._disk)
        return state

    def update(self, accept: Tensor | None) -> None:
        self.step_scaled(accept, None)

    @torch.no_grad()
    def step_scaled(self, accept: Tensor | None, grad_factor: Tensor | None) -> None:
        groups = {p: g for g in self.param_groups for p in g["params"] if p.grad is not None}
        for parameter in groups:
            self.state[parameter]["step"] += 1  # in host memory: reading it does not wait
        # of a shard without elements, other ranks have all
        stored = (self._stored_moments(p) for p in groups if local_shard(p).numel())
        for piece in self._disk.pieces(stored) if self._disk else _moments_on_device(stored):
            self._step_piece(piece, groups[piece.parameter], accept, grad_factor)

    def _stored_moments(self, parameter: nn.Parameter) -> MomentPiece:
        storage = moment_format(parameter.shape, self.moments.dtype)
        blocks = local_shard(parameter).numel() // (storage.block or 1)
        moments = [local_shard(self.state[parameter][name]) for name in storage.names]
        return MomentPiece(parameter, slice(None), [m.view(blocks, -1) for m in moments])

    def _step_piece(
        self, piece: MomentPiece, group: dict, accept: Tensor | None, grad_factor: Tensor | None
    ) -> None:
        parameter, (beta1, beta2) = piece.parameter, group["betas"]
        assert parameter.grad is not None
        step = self.state[parameter]["step"].item()
        storage = moment_format(parameter.shape, self.moments.dtype)
        # Tensors, not floats: a float that changes every step would be compiled for every step.
        scalars = _StepScalars(
            torch.tensor(float(group["lr"])),
            torch.tensor(float(group["weight_decay"])),
            torch.tensor(1 / (1 - beta1**step)),
            torch.tensor((1 - beta2**step) ** -0.5),
            accept,
            grad_factor,
        )
        length = storage.block or 1
        weight = local_shard(parameter).view(-1, length)[piece.blocks]
        grad = local_shard(parameter.grad).reshape(-1, length)[piece.blocks]
        rows = len(weight) if storage.block else 1
        self._update(
            storage.dtype,
            weight.view(rows, -1),
            grad.view(rows, -1),
            [moment.view(rows, -1) for moment in piece.moments],
            scalars,
            _AdamRule((beta1, beta2), group["eps"], self.decoupled),
        )


def _moments_on_device(stored: Iterable[MomentPiece]) -> Iterator[MomentPiece]:
    """All moments of each parameter on its device, which are copied back after the update."""
    for parameter, blocks, moments in stored:
        device = local_shard(parameter).device
        on_device = [moment.to(device, non_blocking=True) for moment in moments]
        yield MomentPiece(parameter, blocks, on_device)
        for index, moment in enumerate(moments):
            if on_device[index] is not moment:
                moment.copy_(on_device[index], non_blocking=True)
        on_device.clear()  # frees them before those of the next parameter are allocated


class _StepScalars(NamedTuple):
    """0-d tensors that change from step to step."""

    lr: Tensor
    weight_decay: Tensor
    correction1: Tensor  # bias correction that the first moment is multiplied by
    correction2: Tensor  # the same for the root of the second moment
    accept: Tensor | None  # on the device; false: change no bit; None: always update
    grad_factor: Tensor | None  # on the device: multiplies the gradient; None: 1


class _AdamRule(NamedTuple):
    """Hyperparameters that are constants of the compiled update."""

    betas: tuple[float, float]
    eps: float
    decoupled: bool


def _update(
    dtype: StateDtype,
    weight: Tensor,  # [blocks, elements], as are the gradient and the moments
    grad: Tensor,
    moments: list[Tensor],
    scalars: _StepScalars,
    rule: _AdamRule,
) -> None:
    """One step of Adam in fp32, in place."""
    lr, weight_decay, correction1, correction2, accept, grad_factor = scalars
    betas, eps, decoupled = rule
    w, g = weight.float(), grad.float()
    if grad_factor is not None:
        g = g * grad_factor
    if decoupled:
        w = w - lr * weight_decay * w
    else:
        g = g + weight_decay * w
    if dtype in UNQUANTIZED:
        first, second = moments
        m = torch.lerp(first.float(), g, 1 - betas[0])
        v = torch.lerp(second.float(), g.square(), 1 - betas[1])
        write_if(first, m, accept)
        write_if(second, v, accept)
        root = v.sqrt()
    else:
        # The root of the second moment is stored, not the moment itself: the root spans no more
        # decades than the first moment, so it is not rounded to 0 where the first moment is not.
        first_codes, second_codes = moments[:2], moments[2:]
        # A comparison makes a size a constant of the graph, whose kernel then reads values once.
        block = next(size for size in BLOCKS if size == weight.shape[-1])
        assert first_codes[0].shape[-1] == block * CODE_BITS[dtype] // 8
        m = torch.lerp(_decode(dtype, first_codes, signed=True), g, 1 - betas[0])
        square = _decode_root(dtype, second_codes).square()
        root = torch.lerp(square, g.square(), 1 - betas[1]).sqrt()
        _encode(dtype, m, first_codes, True, accept)
        _encode(dtype, root, second_codes, False, accept)
    write_if(weight, w - lr * (m * correction1) / (root * correction2 + eps), accept)


@cache
def _compiled_update() -> Callable[..., None]:
    """One graph for all sizes: a few compilations per model, not one per shape."""
    return torch.compile(_update, fullgraph=True, dynamic=True)


# --- codes ---------------------------------------------------------------------------------------


def _encode(
    dtype: StateDtype, values: Tensor, stored: Sequence[Tensor], signed: bool, accept: Tensor | None
) -> None:
    """Quantize blocks of values: codes, and the largest absolute value of each block."""
    codes, scale = stored
    # As integers, positive numbers have the same order, NaN is the largest, and no test finds it.
    largest = values.abs().view(torch.int32).amax(-1, keepdim=True).view(torch.float32)
    write_if(scale, largest, accept)
    normalized = values * (1 / largest.clamp(min=1e-30))  # in [-1, 1]; a block of 0 stays 0
    if dtype == "float8":
        new_codes = (normalized * FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        new_codes = nearest_codes(normalized, CODE_BITS[dtype], signed)
        if dtype == "4bit":
            new_codes = new_codes[:, ::2] * 16 + new_codes[:, 1::2]
    write_if(codes, new_codes, accept)


def _decode(dtype: StateDtype, stored: Sequence[Tensor], signed: bool) -> Tensor:
    codes, scale = stored
    if dtype == "float8":
        return codes.view(torch.float8_e4m3fn).float() * (scale / FLOAT8_MAX)
    if dtype == "4bit":
        codes = torch.stack([codes // 16, codes % 16], -1).flatten(-2)
    return levels_of(codes, CODE_BITS[dtype], signed) * scale


def _decode_root(dtype: StateDtype, stored: Sequence[Tensor]) -> Tensor:
    """The root of the second moment, which is a divisor: 0 only in a block of zeros.

    An element that is small beside the largest of its block gets the lowest code, even while its
    first moment is not rounded to 0. If that code meant 0, the first moment would be divided by
    eps. It means the smallest positive value: the update is then too small, not too large.
    """
    root = _decode(dtype, stored, signed=False)
    return root.clamp(min=stored[1] * FLOAT8_MIN) if dtype == "float8" else root


FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
FLOAT8_MIN = 2.0**-9 / FLOAT8_MAX  # smallest positive value, relative to the largest

# Dynamic tree quantization (https://arxiv.org/abs/2110.02861, section 1.3): each decade below 1 is
# divided evenly, into twice as many intervals as the decade below it; the levels are the middles of
# the intervals, and 1. Signed levels include 0. Unsigned ones are of a root, which is a divisor:
# instead of 0 they include the lower end of the lowest decade (compare
# https://arxiv.org/abs/2309.01507). The n-th level above 0, with 2^d <= n < 2^(d + 1), is
# (18 n + 9 - 16 * 2^d) * 5^d * unit. Tables would take most of the time of an update on a GPU.


def levels_of(codes: Tensor, bits: int, signed: bool) -> Tensor:
    """The fp32 levels of codes, the same whether the compiler fuses products and sums or not."""
    if bits == 4 and not signed:
        return (codes.float() + 1) / 16
    unit = 0.5 * 10.0 ** (signed - bits)
    twice = (2 * codes.int() + (2 - 2**bits if signed else 2)).float()  # 2 n, with the sign
    exponent = twice.abs().view(torch.int32)  # from bit 23: d + 128
    level = 9 * twice.abs() + (9 - 8 * (exponent & 0x7F800000).view(torch.float32))
    has_bit = [exponent & (1 << 23 + bit) != 0 for bit in range(3)]  # of d
    level = level * torch.where(has_bit[0], 5.0, 1.0) * torch.where(has_bit[1], 25.0, 1.0)
    # The factor is the sum of a number of few bits, whose product is exact, and a rest.
    steps = (2.0 ** (math.frexp(f)[1] - n) for f, n in ((625 * unit, 5), (unit, 9)))
    high, low = (f - f % step for f, step in zip((625 * unit, unit), steps, strict=True))
    rest = level * torch.where(has_bit[2], 625 * unit - high, unit - low)
    level = level * torch.where(has_bit[2], high, low) + rest
    level = torch.where(codes == 2**bits - 1, 1.0, level)
    if signed:
        return torch.where(twice == 0, 0.0, level).copysign(twice)
    return torch.where(codes == 0, 10.0 ** (1 - bits), level)


def nearest_codes(values: Tensor, bits: int, signed: bool) -> Tensor:
    """The codes of the levels nearest to values in [-1, 1]; within 1e-6 of a middle, either."""
    absolute = values.abs()
    if bits == 4 and not signed:
        return (absolute * 16 - 1.5).ceil().clamp(0, 15).to(torch.uint8)
    low, top, unit = 1 - signed, 2 ** (bits - signed), 0.5 * 10.0 ** (signed - bits)
    # n is the integer part of a function that is linear in each decade. There the cell of the
    # highest level ends at 0.2 in the next decade, and that of the least level in the lowest.
    least, first = 0.0 if signed else 10.0 ** (1 - bits), (2 * 2**low + 9) * 5.0**low * unit
    second = (2 * 2**low + 18) * 5.0**low * unit  # where the cell of `first` ends
    slope = 0.8 / (second - (least + first) / 2)
    number = absolute * slope + (2**low + 1 - second * slope)
    for d in range(low + 1, bits - signed):
        linear = absolute * (1 / (18 * 5.0**d * unit)) + 8 / 9 * 2.0**d
        number = torch.where(absolute > 2 * 10.0**d * unit, linear, number)
    power = (number.view(torch.int32) & 0x7F800000).view(torch.float32)
    number = torch.where(number - power <= 0.2, power - 0.5, number)
    last = (10 * top - 9) * 5.0 ** (bits - signed - 1) * unit
    number = torch.where(absolute > (last + 1) / 2, top, number)
    if signed:
        return (number.copysign(values).int() + (top - 1)).clamp(min=0).to(torch.uint8)
    return (number.int() - 1).to(torch.uint8)


# --- allocation ----------------------------------------------------------------------------------


def _allocate_moment(
    parameter: nn.Parameter, width: int, dtype: torch.dtype, offload: bool, disk: DiskMoments | None
) -> Tensor:
    """Zeros sharded like the parameter, with rows of another width."""
    local = local_shard(parameter)
    zeros = sharded_zeros(
        parameter,
        dtype,
        shape=(*parameter.shape[:-1], width),
        local_shape=(*local.shape[:-1], local.shape[-1] * width // parameter.shape[-1]),
    )
    zeros = zeros.to("cpu" if offload else local.device)
    if disk is not None:
        disk.place(zeros)
    elif offload and local.is_cuda:
        pin_in_place(zeros, "optimizer.offload = false")
    return zeros


def _synchronize_device(_optimizer: object) -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
