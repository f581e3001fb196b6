"""The load of the experts: measured once a step over the global batch, and balanced by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.metrics import MetricSinks
from titanlite.models import ExpertSizes, LoadBalancing, ModelSizes, ModelSpec, Router
from titanlite.training.periodic import PeriodicAction, StepInfo


class ExpertLoad:
    """The routers of this rank's layers.

    A step calls `begin_step`, `measure` after backward, and `update` if it updates the parameters.
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec[Any], sizes: ModelSizes, mesh: Mesh
    ) -> None:
        self.sizes, self._mesh, self._n_layers = spec.experts(sizes), mesh, sizes.n_layers
        prefix = f"{spec.blocks_path}."
        self._routers = {
            int(name.removeprefix(prefix).partition(".")[0]): module
            for name, module in model.named_modules()
            if isinstance(module, Router)
        }

    @property
    def is_empty(self) -> bool:
        """Whether the model has no experts, on any rank."""
        return self.sizes is None

    def begin_step(self, divisor: float) -> None:
        """Before forward; `divisor`: tokens of the global batch / loss scale."""
        for router in self._routers.values():
            router.begin_step(divisor)

    def forget(self) -> None:
        """Forget a forward and backward that is not part of the step."""
        for router in self._routers.values():
            router.reset_counts()

    def measure(self) -> Tensor | None:
        """Of each of this rank's layers: the selections of each expert in the global batch, and the
        sums of `Router.SUMS` over its tokens; float64 [layers, E + 3], on the device."""
        if not self._routers:
            return None
        routers = self._routers.values()
        # float64 counts exactly, so one all-reduce is enough
        local = torch.stack([torch.cat((r.counts.double(), r.sums.double())) for r in routers])
        for dim in range(self._mesh.fsdp.ndim):
            all_reduce_sum(self._mesh.fsdp[self._mesh.fsdp.mesh_dim_names[dim]], local)
        return local

    def update(self, measured: Tensor | None, accept: Tensor | None) -> None:
        """Update biases and previous loads by what `measure` returned, unless `accept` is False."""
        if measured is None:
            return
        for router, row in zip(self._routers.values(), measured, strict=True):
            router.finish_step(row[: router.sizes.count], accept)

    def of_all_layers(self, own: Tensor | None) -> Tensor:
        """[all layers, ...] of the whole model, from rows of this rank's layers; a collective.

        The rows of layers without experts are 0.
        """
        assert self.sizes is not None
        width = self.sizes.count + len(SUMS) if own is None else own.shape[1]

    def state(self) -> list[list[float]]: ...
