"""Adam and AdamW whose moments take less memory: fewer bits each, or host memory.

A moment of 8 or 4 bits is a code for each element and a scale for each block of a row. Blocks are
cut by the whole shape and never by a shard, so that every layout computes the same numbers, and a
checkpoint, which holds plain tensors of codes and scales, is read under any of them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlite.distributed.tensors import local_shard
from titanlite.optim.fp32_vectors import is_low_vector

StateDtype = Literal["float32", "bfloat16", "8bit", "4bit", "float8"]

BLOCK, LEAST_BLOCK = 128, 32  # elements under one scale, at most and at least
CODE_BITS = {"8bit": 8, "4bit": 4, "float8": 8}
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class MomentFormat:
    """How a parameter's moments are kept."""

    kind: StateDtype
    block: int = 0  # elements under one scale; 0: there are no codes

    @property
    def names(self) -> list[str]:
        """What an optimizer's state calls them: codes have a name of their own, so that a
        checkpoint of one kind is never read as another."""
        if not self.block:
            return ["exp_avg", "exp_avg_sq"]
        kind = self.kind
        moments = (f"exp_avg_{kind}", f"exp_avg_root_{kind}")
        return [name for moment in moments for name in (moment, f"{moment}_scale")]


def moment_format(shape: Iterable[int], kind: StateDtype) -> MomentFormat:
    """How the moments of a parameter of this whole shape are kept; vectors have no codes."""
    if kind in PLAIN:
        return MomentFormat(kind)
    *rows, width = shape
    block = gcd(width, BLOCK)
    return MomentFormat(kind, block) if rows and block >= LEAST_BLOCK else MomentFormat("float32")


def moment_bytes(shape: Iterable[int], kind: StateDtype) -> int:
    """Bytes of both moments of a parameter of this shape."""
    shape = tuple(shape)
    storage, elements = moment_format(shape, kind), torch.Size(shape).numel()
    if not storage.block:
        return 2 * elements * PLAIN[storage.kind].itemsize
    return 2 * (elements * CODE_BITS[kind] // 8 + elements // storage.block * 4)


class LowMemoryAdam(torch.optim.Optimizer):
    """Adam or AdamW (https://arxiv.org/abs/1711.05101), with moments kept as `kind` says.

    `host`: they stay in host memory and visit the device one parameter at a time. `compiled`: each
    update is one kernel; else it is one an operation, and needs memory for what is between them.
    """

    def __init__(
        self,
        groups: Iterable[dict],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool,  # weight decay: AdamW's, not Adam's
        kind: StateDtype = "float32",
        host: bool = False,
        compiled: bool = True,
    ):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.kind, self.host, self.decoupled = kind, host, decoupled
        self._update = _compiled() if compiled else _update
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._moments(parameter)
        if host:  # moments may still be on their way back when somebody asks for them
            self.register_state_dict_pre_hook(lambda _: _wait_for_device())

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        storage = moment_format(parameter.shape, self.kind)
        width = parameter.shape[-1]
        if not storage.block:
            same = self.kind == "float32" and not is_low_vector(parameter)
            # as torch's own optimizers have it: of the weights' type
            kinds = [(width, parameter.dtype if same else PLAIN[storage.kind])] * 2
        else:
            codes = (width * CODE_BITS[self.kind] // 8, torch.uint8)
            kinds = [codes, (width // storage.block, torch.float32)] * 2
            assert local_shard(parameter).shape[-1] % storage.block == 0, (
                "a job is checked for this"
            )
        moments = [_zeros(parameter, *kind, self.host) for kind in kinds]
        return {"step": torch.tensor(0.0), **dict(zip(storage.names, moments, strict=True))}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        state["step"] += 1  # in host memory, so that nobody waits for it
        steps, storage = state["step"].item(), moment_format(parameter.shape, self.kind)
        weight, gradient = local_shard(parameter), local_shard(parameter.grad)
        if not weight.numel():  # another rank has all of it
            return
        kept = [local_shard(state[name]) for name in storage.names]
        here = [moment.to(weight.device, non_blocking=True) for moment in kept]
        # Tensors, not numbers: what changes from step to step must not be compiled anew.
        rate, decay, unbias1, unbias2 = map(
            torch.tensor,
            (
                float(group["lr"]),
                float(group["weight_decay"]),
                1 / (1 - beta1**steps),
                (1 - beta2**steps) ** -0.5,
            ),
        )
        blocks = weight.numel() // storage.block if storage.block else 1
        self._update(
            storage.kind,
            weight.view(blocks, -1),
            gradient.reshape(blocks, -1),
            [moment.view(blocks, -1) for moment in here],
            _levels_on(storage.kind, weight.device),
            (rate, decay, unbias1, unbias2),
            (beta1, beta2),
            group["eps"],
            self.decoupled,
        )
        for old, new in zip(kept, here, strict=True):
            if new is not old:
                old.copy_(new, non_blocking=True)


def _update(
    kind: StateDtype,
    weight: Tensor,  # [blocks, elements], as are the others
    gradient: Tensor,
    moments: list[Tensor],
    levels: tuple[Tensor, ...],  # the values of the codes of either moment
    changing: tuple[Tensor, ...],
    betas: tuple[float, float],
    eps: float,
    decoupled: bool,
) -> None:
    """One step of Adam in fp32, in place."""
    rate, decay, unbias1, unbias2 = changing
    w, g = weight.float(), gradient.float()
    if decoupled:
        w = w - rate * decay * w
    else:
        g = g + decay * w
    if kind in PLAIN:
        first, second = moments
        m = torch.lerp(first.float(), g, 1 - betas[0])
        v = torch.lerp(second.float(), g.square(), 1 - betas[1])
        first.copy_(m)
        second.copy_(v)
        root = v.sqrt()
    else:
        # The root is kept, not the square: it spans no more decades than the first moment, so that
        # no element with a first moment has a second one that is rounded to nothing.
        first, second = moments[:2], moments[2:]
        m = torch.lerp(_decode(kind, first, levels[:1]), g, 1 - betas[0])
        square = _decode_root(kind, second, levels[1:]).square()
        root = torch.lerp(square, g.square(), 1 - betas[1]).sqrt()
        _encode(kind, m, first, levels[:1])
        _encode(kind, root, second, levels[1:])
    weight.copy_(w - rate * (m * unbias1) / (root * unbias2 + eps))


@cache
def _compiled():
    """One graph for all sizes, so that a model costs a few compilations, not one a shape."""
    return torch.compile(_update, fullgraph=True, dynamic=True)


# --- codes ---------------------------------------------------------------------------------------


def _encode(kind: StateDtype, values: Tensor, into: list[Tensor], levels: tuple) -> None:
    """Write blocks of values as codes and the largest absolute value of each block."""
    codes, scale = into
    largest = values.abs().amax(-1, keepdim=True)
    scale.copy_(largest)
    shares = values / largest.clamp(min=1e-30)  # in [-1, 1]; of a block of zeros, zero
    if kind == "float8":
        found = (shares * FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        (level,) = levels
        found = torch.bucketize(shares, (level[1:] + level[:-1]) / 2)  # to the nearest
        if kind == "4bit":
            found = found[:, ::2] * 16 + found[:, 1::2]
    codes.copy_(found)


def _decode(kind: StateDtype, stored: list[Tensor], levels: tuple) -> Tensor:
    codes, scale = stored
    if kind == "float8":
        return codes.view(torch.float8_e4m3fn).float() * (scale / FLOAT8_MAX)
    (level,) = levels
    if kind == "4bit":
        codes = torch.stack([codes // 16, codes % 16], -1).flatten(-2)
    return level[codes.int()] * scale


def _decode_root(kind: StateDtype, stored: list[Tensor], levels: tuple) -> Tensor:
    """The root of the second moment, which updates are divided by: 0 only in a block of zeros.

    Beside a large element of its block a small one gets the lowest code, in the root sooner than in
    the first moment. Read as 0, it would divide that moment by eps; read as the smallest value
    above 0, the root is too large rather than too small, and the update too short.
    """
    root = _decode(kind, stored, levels)
    return root.clamp(min=stored[1] * FLOAT8_LEAST) if kind == "float8" else root


FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
FLOAT8_LEAST = 2.0**-9 / FLOAT8_MAX  # smallest value above 0, as a share of the largest


@cache
def _levels_on(kind: StateDtype, device: torch.device) -> tuple[Tensor, ...]:
    """What the codes of the first moment mean, and those of the second."""
    if kind == "8bit":
        levels = (dynamic_levels(8, signed=True), dynamic_levels(8, signed=False))
    elif kind == "4bit":
        levels = (dynamic_levels(4, signed=True), [n / 16 for n in range(1, 17)])
    else:
        return ()
    return tuple(torch.tensor(level, device=device) for level in levels)


def dynamic_levels(bits: int, signed: bool) -> list[float]:
    """The 2^bits values of dynamic tree quantization, ascending, 1 the largest.

    0 is among the signed ones. The unsigned ones are of a root, which is divided by: in the place
    of 0 they have the lower end of the lowest decade (compare https://arxiv.org/abs/2309.01507).
    Each decade is cut evenly, into twice as many parts as the one below it, the values being their
    middles (https://arxiv.org/abs/2110.02861, section 1.3).
    """
    decades = bits - 1
    levels = [0.0 if signed else 10.0**-decades, 1.0]
    for decade in range(decades):
        parts = 2 ** (decade if signed else decade + 1)
        top = 10.0 ** (decade - decades + 1)
        middles = [top * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        levels += [sign * middle for sign in ((1, -1) if signed else (1,)) for middle in middles]
    return sorted(levels)


# --- where moments are ---------------------------------------------------------------------------


def _zeros(parameter: nn.Parameter, width: int, dtype: torch.dtype, host: bool) -> Tensor:
    """Zeros spread as the parameter is, with rows of another width."""
    local = local_shard(parameter)
    own_width = local.shape[-1] * width // parameter.shape[-1]
    zeros = torch.zeros((*local.shape[:-1], own_width), dtype=dtype, device=local.device)
    if isinstance(parameter, DTensor):
        shape = torch.Size((*parameter.shape[:-1], width))
        zeros = DTensor.from_local(
            zeros,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
    zeros = zeros.to("cpu" if host else local.device)  # a mesh of GPUs moves what it is given
    if host and local.is_cuda:
        _pin(local_shard(zeros))
    return zeros


def _pin(tensor: Tensor) -> None:
    """Lock the pages of a tensor where it is, so that the device copies it by itself."""
    if tensor.numel():
        torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
