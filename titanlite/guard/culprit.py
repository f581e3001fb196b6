"""Find the rank, the module and the tensor that caused a violating step."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.distributed.collectives import AsyncMax, local_shard
from titanlite.training.step import StepResult

MESSAGE_BYTES = 2048  # size of the finding that one rank sends to all
MAX_NAME_LENGTH = 300  # of a parameter, module or host in it
_LAYERS = re.compile(r"(^|\.)layers(\.(?P<number>\d+)(?P<inside>\..*)?)?$")
AFTER_LAYERS = (1 << 20) - 2  # order of modules after all layers
MAX_CALLS = 1 << 20  # of modules, in one step
MAX_OUTPUT = 1e18  # the sum of 400 such squares, as norms compute it, overflows float32
_RANKS = 1 << 20  # more than any number of ranks
_ORDERS = 1 << 41  # more than any order of an OutputProbe


@dataclass(frozen=True)
class Culprit:
    """Where a violation comes from, as far as it is known; the same on all ranks."""

    rank: int | None = None  # None: no single rank
    host: str = ""
    pipeline_rank: int = 0  # coordinate of the rank in the pipeline dimension
    kind: str = "gradient"  # what has the bad value: activation, loss, gradient or weight
    parameter: str = ""  # the first one of the rank whose gradient shard is bad
    module: str = ""  # the first one whose output is bad

    def __str__(self) -> str:
        if self.rank is None:
            return ""
        what = f"the {self.kind}"
        name = self.module if self.kind == "activation" else self.parameter
        what += f" of {name}" if name and self.kind != "loss" else ""
        return f"{what} on rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Evidence:
    """What one rank knows about the cause of a violation.

    Only the strongest evidence of all ranks is used. It has the highest `level`, then the highest
    `strength` (0 to `_ORDERS` - 1), then the lowest rank.
    """

    level: int = 0  # 0: none
    strength: int = 0
    culprit: Culprit = dataclasses.field(default_factory=Culprit)


class CulpritSearch:
    """Compares the evidence of all ranks. Its methods that take `max_over_ranks` are collective."""

    def __init__(self, names: list[str], pipeline_rank: int):
        """`names` of this rank's parameters, in the order of `StepResult.own_norms`."""
        self._names = names
        self._own = Culprit(dist.get_rank(), socket.gethostname()[:MAX_NAME_LENGTH], pipeline_rank)

    def nonfinite(self, result: StepResult, module: str = "", order: int = 0) -> Evidence:
        """This rank's evidence for inf or NaN; `module` and `order` are from an OutputProbe.

        An output comes before the loss, and the loss before the gradients, to which one rank's
        inf or NaN spreads in the reduction over ranks.
        """
        bad = [not math.isfinite(norm) for norm in result.own_norms.tolist()]
        parameter = self._names[bad.index(True)][:MAX_NAME_LENGTH] if any(bad) else ""
        found = dataclasses.replace(self._own, parameter=parameter)
        if module:
            found = dataclasses.replace(found, kind="activation", module=module[:MAX_NAME_LENGTH])
            return Evidence(3, _ORDERS - 1 - order, found)
        if not result.own_losses.isfinite().all():
            return Evidence(2, 0, dataclasses.replace(found, kind="loss"))
        return Evidence(1, 0, found) if parameter else Evidence()

    def nonfinite_parameter(self, norms: Tensor) -> Evidence:
        """This rank's evidence for inf or NaN in a parameter, from `shard_norms`."""
        bad = [not math.isfinite(norm) for norm in norms.tolist()]
        if not any(bad):
            return Evidence()
        name = self._names[bad.index(True)][:MAX_NAME_LENGTH]
        return Evidence(1, 0, dataclasses.replace(self._own, kind="weight", parameter=name))

    def spike(self, result: StepResult, is_loss: bool) -> Evidence:
        """This rank's evidence for a spike: its share of the loss, or its largest gradient norm."""
        norms = result.own_norms.tolist()
        largest = max(range(len(norms)), key=norms.__getitem__)
        name = self._names[largest][:MAX_NAME_LENGTH]
        found = dataclasses.replace(self._own, parameter=name)
        if is_loss:
            found = dataclasses.replace(found, kind="loss", parameter="")
        value = float(result.own_losses.sum()) if is_loss else norms[largest]
        return Evidence(1, _ordered_bits(value), found)

    def other_bits(self, first: StepResult, replayed: StepResult) -> Evidence:
        """This rank's evidence that its part of a step has other bits than that of the replay.

        What one rank adds to the loss is compared before the gradients, to which a fault of one
        rank spreads in the reduction over ranks.
        """
        if not _equal(first.own_losses, replayed.own_losses):
            return Evidence(3, 0, dataclasses.replace(self._own, kind="loss"))
        for number, name in enumerate(self._names):
            if not _equal(first.own_norms[number], replayed.own_norms[number]):
                return Evidence(2, 0, dataclasses.replace(self._own, parameter=name))
        totals = ((first.loss, replayed.loss), (first.grad_norm, replayed.grad_norm))
        if all(_equal(one, other) for one, other in totals):
            return Evidence()
        return Evidence(1)  # only what the ranks reduced together differs

    def strongest(
        self, own: Evidence, max_over_ranks: AsyncMax, values: dict[str, Any] | None = None
    ) -> tuple[int, Culprit, dict[str, Any]]:
        """(level, culprit, values) of the rank with the strongest evidence, on every rank.

        `values` are JSON values of this rank, such as its loss.
        """
        rank = dist.get_rank()
        key = (own.level * _ORDERS + own.strength) * _RANKS + _RANKS - 1 - rank
        max_over_ranks.start(key)
        (highest,) = max_over_ranks.wait()
        winner, level = _RANKS - 1 - highest % _RANKS, highest // _RANKS // _ORDERS
        message = json.dumps([dataclasses.asdict(own.culprit), values or {}]).encode()
        max_over_ranks.start(*(message if rank == winner else b"").ljust(MESSAGE_BYTES, b"\0"))
        culprit, values = json.loads(bytes(max_over_ranks.wait()).rstrip(b"\0"))
        return level, Culprit(**culprit), values


def _ordered_bits(value: float) -> int:
    """A non-negative int that grows with the absolute value; the largest for NaN."""
    magnitude = math.inf if math.isnan(value) else abs(value)
    (bits,) = struct.unpack("<I", struct.pack("<f", min(magnitude, torch.finfo(torch.float32).max)))
    return bits


def _equal(first: Tensor, replayed: Tensor) -> bool:
    """Whether two values have the same bits, or are both NaN.

    Some GPU kernels add in an order that changes, which changes the last bits. So on a GPU 1 % is
    tolerated: a fault that made the step a violation changed more.
    """
    exact = first.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    tolerance = 0.0 if exact else 1e-2
    return torch.allclose(first, replayed, rtol=tolerance, atol=0.0, equal_nan=True)


class OutputProbe:
    """Records for each call of a module of this rank whether its output is bad."""

    def __init__(self, model: nn.Module, inside_layers: bool):
        """`inside_layers`: also the modules inside a layer; not if the layers are compiled."""
        self._modules: dict[str, nn.Module] = {}
        self._order: dict[str, int] = {}  # by name: of the layer in the whole model
        behind = False  # whether a layer came before; a pipeline stage may have none
        for name, module in model.named_modules():
            layers = _LAYERS.search(name)
            behind |= layers is not None
            number = layers["number"] if layers else None
            is_container = not name or (layers is not None and number is None)
            if is_container or (layers and layers["inside"] and not inside_layers):
                continue
            self._modules[name] = module
            self._order[name] = int(number) if number else AFTER_LAYERS if behind else -1
        self._calls: list[tuple[str, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls inside the block."""
        hooks = [
            module.register_forward_hook(
                lambda _module, _inputs, output, name=name: self._record(name, output)
            )
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _record(self, name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            with torch.no_grad():
                largest = local_shard(output.detach()).float().abs().amax()  # NaN if one is NaN
                self._calls.append((name, largest < MAX_OUTPUT))

    def first_bad(self) -> tuple[str, int]:
        """(module, order) of the first call with a bad output; the order compares over all ranks.

        ("", 0) if there is none. Waits for the device.
        """
        if not self._calls:
            return "", 0
        flags = torch.stack([is_good for _, is_good in self._calls]).tolist()
        found = [
            (self._order[name], number, name)
            for number, (name, _) in enumerate(self._calls)
            if not flags[number]
        ]
        if not found:
            return "", 0
        layer, number, name = min(found)
        return name, (layer + 1) * MAX_CALLS + number
