"""A periodic action that records gradient, weight and update norms of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.optim import count_copies
from titanlite.training.periodic import StepInfo, measure_steps
from titanlite.training.state import TrainState

KINDS = ("gradient", "weight", "update")


class LayerNorms:
    """Norms of the layers of the whole model, the same in every layout.

    `layers` are all layers of the model, on every rank; `layer_of` is the layer of a parameter, by
    its name.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, layers: Iterable[str], layer_of: Callable[[str], str]
    ):
        self.layers, self._mesh = list(layers), mesh
        named = list(model.named_parameters())
        self._parameters = [parameter for _, parameter in named]
        self._layer = torch.tensor([self.layers.index(layer_of(name)) for name, _ in named])
        self._copies = torch.tensor([count_copies(parameter, mesh) for _, parameter in named])

    @torch.no_grad()
    def combine(self, state: TrainState, gradient_norms: Tensor) -> Tensor | None:
        """[KINDS, layers]: the norms of the step that was armed; None if no optimizer ran in it.

        `gradient_norms` are those of this rank's shards. A collective of all ranks.
        """
        measured = state.optimizer.update_norms.take()
        if not measured:
            return None
        device = gradient_norms.device
        zero = torch.zeros((), device=device)
        pairs = [measured.get(parameter, (zero, zero)) for parameter in self._parameters]
        kinds = [gradient_norms, *(torch.stack(norms) for norms in zip(*pairs, strict=True))]
        squares = torch.stack([norms.to(device) for norms in kinds]).square()
        squares /= self._copies.to(device)
        sums = torch.zeros(len(KINDS), len(self.layers), device=device)
        sums.index_add_(1, self._layer.to(device), squares)
        # mesh.loss and mesh.tp together span all ranks
        return all_reduce_sum(self._mesh.tp, all_reduce_sum(self._mesh.loss, sums)).sqrt()


def build_layer_norms(metered: MeteredRun) -> Meter | None:
    """Write the event `layer_norms` of every `metrics.layer_norms_freq`-th step."""
    freq, state, sinks = metered.metrics.layer_norms_freq, metered.run.state, metered.run.sinks
    if not freq:
        return None
    with torch.device("meta"):
        model = metered.spec.build(metered.sizes)
    layer_of = partial(_layer_of, metered.spec.blocks_path)
    layers = dict.fromkeys(layer_of(name) for name, _ in model.named_parameters())
    norms = LayerNorms(state.model, metered.run.step_settings.mesh, layers, layer_of)

    def record(info: StepInfo) -> None:
        combined = norms.combine(state, info.result.own_norms)
        if combined is not None and sinks.sinks:
            rows = zip(KINDS, combined.tolist(), strict=True)
            fields = {kind: dict(zip(norms.layers, row, strict=True)) for kind, row in rows}
            sinks.event(info.step, "layer_norms", **fields)

    return Meter(measure_steps("layer norms", freq, state.optimizer.update_norms, record))


def _layer_of(blocks_path: str, parameter: str) -> str:
    """The layer of a parameter by its name: a block (layers.3) or another module (output)."""
    if parameter.startswith(f"{blocks_path}."):
        block, _, _ = parameter.removeprefix(f"{blocks_path}.").partition(".")
        return f"{blocks_path}.{block}"
    return parameter.partition(".")[0]
