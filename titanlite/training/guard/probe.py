"""Find the first module whose output is inf, NaN or huge, while a step is replayed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titanlite.distributed.tensors import local_shard

_LAYERS = re.compile(r"(^|\.)layers(\.(?P<number>\d+)(?P<inside>\..*)?)?$")
AFTER_LAYERS = (1 << 20) - 2  # order of modules after all layers
MAX_CALLS = 1 << 20  # of modules, in one step
MAX_OUTPUT = 1e18  # the sum of 400 such squares, as norms compute it, overflows float32


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
