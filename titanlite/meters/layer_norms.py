"""A periodic action that records gradient, weight and update norms of each layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.meters.metered_run import Meter, MeteredRun, measure_steps
from titanlite.optim import count_copies
from titanlite.training.periodic import StepInfo
from titanlite.training.state import TrainState

KINDS = ("gradient", "weight", "update")


@torch.no_grad()
def combine_layer_norms(
    state: TrainState,
    mesh: Mesh,
    gradient_norms: Tensor,
    layers: list[str],
    layer_of: Callable[[str], str],
) -> Tensor | None:
    """[KINDS, layers]: the norms of the step that was armed; None if no optimizer ran in it.

    They are those of the whole model, and the same in every layout. `gradient_norms` are those of
    this rank's shards; `layer_of` is the layer of a parameter, by its name. A collective.
    """
    measured = state.optimizer.update_norms.take()
    if not measured:
        return None
    names, parameters = zip(*state.model.named_parameters(), strict=True)
    device = gradient_norms.device
    zero = torch.zeros((), device=device)
    pairs = [measured.get(parameter, (zero, zero)) for parameter in parameters]
    kinds = [gradient_norms, *(torch.stack(norms) for norms in zip(*pairs, strict=True))]
    squares = torch.stack([norms.to(device) for norms in kinds]).square()
    squares /= torch.tensor([count_copies(p, mesh) for p in parameters], device=device)
    rows = torch.tensor([layers.index(layer_of(name)) for name in names], device=device)
    sums = torch.zeros(len(KINDS), len(layers), device=device).index_add_(1, rows, squares)
    # mesh.loss and mesh.tp together span all ranks
    return all_reduce_sum(mesh.tp, all_reduce_sum(mesh.loss, sums)).sqrt()


def build_layer_norms(metered: MeteredRun) -> Meter | None:
    """Write the event `layer_norms` of every `metrics.layer_norms_freq`-th step."""
    freq, state, sinks = metered.metrics.layer_norms_freq, metered.run.state, metered.run.sinks
    if not freq:
        return None
    with torch.device("meta"):
        model = metered.spec.build(metered.sizes)
    blocks = f"{metered.spec.blocks_path}."

    def layer_of(parameter: str) -> str:
        """A block (layers.3) or another module (output)."""
        path = blocks if parameter.startswith(blocks) else ""
        return path + parameter.removeprefix(path).partition(".")[0]

    layers = list(dict.fromkeys(layer_of(name) for name, _ in model.named_parameters()))
    mesh = metered.run.step_settings.mesh

    def record(info: StepInfo) -> None:
        combined = combine_layer_norms(state, mesh, info.result.own_norms, layers, layer_of)
        if combined is not None and sinks.sinks:
            rows = zip(KINDS, combined.tolist(), strict=True)
            fields = {kind: dict(zip(layers, row, strict=True)) for kind, row in rows}
            sinks.event(info.step, "layer_norms", **fields)

    return Meter(measure_steps("layer norms", freq, state.optimizer.update_norms, record))
