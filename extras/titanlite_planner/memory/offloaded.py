"""Bytes that a rank keeps in host memory: offloaded activations and optimizer states."""

from __future__ import annotations

from titanlite_planner.memory.activations import BlockActivations
from titanlite_planner.stages import stage_ranks, stages_in_flight, stages_of
from titanlite_planner.time.step import model_parameters
from titanlite_planner.workload import Workload


def offloaded_bytes(workload: Workload) -> float:
    """Host memory of a rank beside the process itself: the mean state, and the most activations."""
    layout, numerics = workload.layout, workload.numerics
    owned = model_parameters(workload.model) / layout.tensor / layout.pipeline
    owned /= layout.shard * layout.context
    total = 0.0
    if workload.offload_optimizer or workload.offload_parameters:
        total += owned * numerics.state_bytes
    if workload.offload_parameters:
        total += owned * (numerics.parameter_bytes + numerics.gradient_bytes)
    return total + (_activations(workload) if workload.offload_activations else 0.0)


def _activations(workload: Workload) -> float:
    """What the blocks of all micro-batches in flight have saved."""
    layout, activations = workload.layout, BlockActivations(workload)
    owners, stages = stage_ranks(layout), stages_of(workload)
    of_run = layout.n_microbatches // max(1, layout.runs)
    in_flight = stages_in_flight(layout.schedule, owners, of_run, layout.actions)
    largest = 0.0
    for rank, counts in enumerate(in_flight):
        own = [stages[number] for number, owner in enumerate(owners) if owner == rank]
        saved = 0.0
        for index, stage in enumerate(own):
            blocks = range(stage.first_block, stage.first_block + stage.blocks)
            saved += counts.get(index, 1) * sum(activations.saved(block) for block in blocks)
        largest = max(largest, saved)
    return largest
