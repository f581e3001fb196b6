"""Find the rank, the module and the tensor that caused a violating step."""

from __future__ import annotations

import dataclasses
import math
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.distributed.collectives import gather_from_all_ranks, local_shard
from titanlite.training.step import StepResult

_LAYERS = re.compile(r"(^|\.)layers(\.(?P<number>\d+)(?P<inside>\..*)?)?$")
MAX_OUTPUT = 1e18  # the sum of 400 such squares, as norms compute it, overflows float32


@dataclass(frozen=True)
class Culprit:
    """Where a violation comes from, as far as it is known; the same on all ranks."""

    rank: int | None = None  # None: no single rank
    host: str = ""
    pipeline_rank: int = 0  # coordinate of the rank in the pipeline dimension
    kind: str = "gradient"  # what has the bad value: activation, loss, gradient or weight
    parameter: str = ""  # the first that is bad or differs; of a spike, that of the largest norm
    module: str = ""  # the first one whose output is bad

    def __str__(self) -> str:
        if self.rank is None:
            return ""
        what = f"the {self.kind}"
        name = self.module if self.kind == "activation" else self.parameter
        what += f" of {name}" if name and self.kind != "loss" else ""
        return f"{what} on rank {self.rank} ({self.host})"


class Evidence(NamedTuple):
    """What one rank knows about the cause of a violation."""

    strength: tuple[float, ...] = (0,)  # compared between ranks; its first number is 0 for none
    culprit: Culprit = Culprit()


class OutputCall(NamedTuple):
    """A call of a module of this rank."""

    layer: float  # number in the whole model; -inf, inf: before and after the layers
    module: str
    is_good: Tensor  # 0-d bool on the device: whether its output is


class CulpritSearch:
    """Collects the evidence of this rank."""

    def __init__(self, names: list[str], pipeline_rank: int):
        """`names` of this rank's parameters, in the order of `StepResult.own_norms`."""
        self._names = names
        self._own = Culprit(dist.get_rank(), socket.gethostname(), pipeline_rank)

    def _evidence(self, *strength: float, **found: Any) -> Evidence:
        return Evidence(strength, dataclasses.replace(self._own, **found))

    def _first_nonfinite(self, norms: Tensor) -> str:
        """The first parameter with a norm that is inf or NaN, or ""."""
        pairs = zip(self._names, norms.tolist(), strict=True)
        return next((name for name, norm in pairs if not math.isfinite(norm)), "")

    def nonfinite(self, result: StepResult, calls: list[OutputCall]) -> Evidence:
        """This rank's evidence for inf or NaN; `calls` are from `recording_outputs`.

        An output comes before the loss, and the loss before the gradients, to which one rank's
        inf or NaN spreads in the reduction over ranks. Waits for the device.
        """
        parameter = self._first_nonfinite(result.own_norms)
        good = torch.stack([call.is_good for call in calls]).tolist() if calls else []
        bad = [(calls[i].layer, i) for i, is_good in enumerate(good) if not is_good]
        if bad:
            layer, number = min(bad)
            found = {"kind": "activation", "module": calls[number].module}
            return self._evidence(3, -layer, -number, parameter=parameter, **found)
        if not result.own_losses.isfinite().all():
            return self._evidence(2, kind="loss", parameter=parameter)
        return self._evidence(1, parameter=parameter) if parameter else Evidence()

    def nonfinite_parameter(self, norms: Tensor) -> Evidence:
        """This rank's evidence for inf or NaN in a parameter, from `shard_norms`."""
        name = self._first_nonfinite(norms)
        return self._evidence(1, kind="weight", parameter=name) if name else Evidence()

    def spike(self, result: StepResult, is_loss: bool) -> Evidence:
        """This rank's evidence for a spike: its share of the loss, or its largest gradient norm."""
        if is_loss:
            return self._evidence(1, float(result.own_losses.sum()), kind="loss")
        largest = int(result.own_norms.argmax())
        return self._evidence(1, float(result.own_norms[largest]), parameter=self._names[largest])

    def other_bits(self, first: StepResult, replayed: StepResult) -> Evidence:
        """This rank's evidence that its part of a step has other bits than that of the replay.

        Losses of ranks are compared before gradients, to which the reduction spreads a fault.
        """
        # The losses are where the step was computed; with CPU offload, the norms are not.
        exact = first.own_losses.is_cpu or torch.are_deterministic_algorithms_enabled()
        if not _equal(first.own_losses, replayed.own_losses, exact):
            return self._evidence(3, kind="loss")
        for name, *norms in zip(self._names, first.own_norms, replayed.own_norms, strict=True):
            if not _equal(norms[0], norms[1], exact):
                return self._evidence(2, parameter=name)
        totals = ((first.loss, replayed.loss), (first.grad_norm, replayed.grad_norm))
        if all(_equal(*pair, exact) for pair in totals):
            return Evidence()
        return Evidence((1,))  # only what the ranks reduced together differs


def find_strongest(own: Evidence, values: Any = None) -> tuple[float, Culprit, Any]:
    """(level, culprit, values) of the rank with the strongest evidence, on every rank.

    The level is the first number of the strength. `values` are JSON values of this rank, such as
    its loss. Of equal ranks, the first one counts. A collective of all ranks.
    """
    reports = gather_from_all_ranks([own.strength, dataclasses.asdict(own.culprit), values])
    strength, culprit, values = max(reports, key=lambda report: report[0])
    return strength[0], Culprit(**culprit), values


def _equal(first: Tensor, replayed: Tensor, exact: bool) -> bool:
    """Whether two values have the same bits, or are both NaN.

    Some GPU kernels add in an order that changes, which changes the last bits. So on a GPU 1 % is
    tolerated: a fault that made the step a violation changed more.
    """
    return torch.allclose(first, replayed, rtol=0.0 if exact else 1e-2, atol=0.0, equal_nan=True)


@contextmanager
def recording_outputs(model: nn.Module, inside_layers: bool) -> Iterator[list[OutputCall]]:
    """Record each call of a module of this rank in the block, and whether its output is good.

    `inside_layers`: also the modules inside a layer; not if the layers are compiled.
    """
    calls: list[OutputCall] = []

    @torch.no_grad()
    def record(layer: float, name: str, _module: object, _inputs: object, output: object) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if (own := local_shard(output.detach())).numel():  # none: experts without tokens
            largest = own.float().abs().amax()  # NaN if one is NaN
            calls.append(OutputCall(layer, name, largest < MAX_OUTPUT))

    hooks = [
        module.register_forward_hook(partial(record, layer, name))
        for layer, name, module in _observed_modules(model, inside_layers)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _observed_modules(
    model: nn.Module, inside_layers: bool
) -> Iterator[tuple[float, str, nn.Module]]:
    """(layer, name, module) of the modules whose outputs are recorded; see `OutputCall`."""
    layer = -math.inf  # of modules outside the layers; a pipeline stage may have none before them
    for name, module in model.named_modules():
        if match := _LAYERS.search(name):
            layer = math.inf
            if match["number"] and (inside_layers or not match["inside"]):
                yield int(match["number"]), name, module
        elif name:
            yield layer, name, module
