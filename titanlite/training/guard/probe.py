"""Find the first module whose output has inf or NaN, while a step is computed again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titanlite.distributed.tensors import local_shard

_LAYER = re.compile(r"(^|\.)layers\.(\d+)(\.|$)")
AFTER_LAYERS = (1 << 20) - 2  # order of modules behind all layers
MAX_CALLS = 1 << 20  # of modules, in one step


class OutputProbe:
    """Records for each call of a module of this rank whether its output is finite."""

    def __init__(self, model: nn.Module, inside_layers: bool):
        """`inside_layers`: also the modules inside a layer; not if the layers are compiled."""
        self._modules: dict[str, nn.Module] = {}
        behind = False
        self._order: dict[str, int] = {}  # by name: of the layer in the whole model
        for name, module in model.named_modules():
            layer = _LAYER.search(name)
            behind |= layer is not None
            if not name or isinstance(module, (nn.ModuleDict, nn.ModuleList)):
                continue
            if layer and not inside_layers and name[layer.end(2) :]:
                continue
            self._modules[name] = module
            self._order[name] = int(layer[2]) if layer else AFTER_LAYERS if behind else -1
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
                self._calls.append((name, local_shard(output.detach()).isfinite().all()))

    def first_nonfinite(self) -> tuple[str, int]:
        """(module, order) of the first call with inf or NaN; the order compares over all ranks.

        ("", 0) if there is none. Waits for the device.
        """
        if not self._calls:
            return "", 0
        flags = torch.stack([finite for _, finite in self._calls]).tolist()
        found = [
            (self._order[name], number, name)
            for number, (name, _) in enumerate(self._calls)
            if not flags[number]
        ]
        if not found:
            return "", 0
        layer, number, name = min(found)
        return name, (layer + 1) * MAX_CALLS + number
