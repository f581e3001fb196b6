"""What measures or checks a run, without changing it: a file for each meter."""

from __future__ import annotations

from collections.abc import Callable

from titanlite.meters.expert_load import build_expert_load
from titanlite.meters.layer_norms import build_layer_norms
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.meters.noise_scale import build_noise_scale
from titanlite.meters.replica_check import build_replica_check
from titanlite.meters.source_losses import build_source_losses
from titanlite.meters.straggler import build_straggler_report

# Builders of meters (None: not used). Their actions come first, in this order. Add a meter here.
METERS: tuple[Callable[[MeteredRun], Meter | None], ...] = (
    build_layer_norms,
    build_expert_load,
    build_replica_check,
    build_straggler_report,
    build_noise_scale,
    build_source_losses,
)
