"""What happened: how fast it goes, where it is told, what a device could do, traces."""

from __future__ import annotations

from titanlite.observe.config import (
    MetricsConfig,
    ProfilingConfig,
    metrics_problems,
    profiling_problems,
)
from titanlite.observe.curve import draw_loss
from titanlite.observe.hardware import measure_matmul_flops, peak_flops, peak_memory_bytes
from titanlite.observe.memory import Held
from titanlite.observe.meters import Meter, open_meter
from titanlite.observe.profiler import open_profiler
from titanlite.observe.sinks import METRICS_FILE, Sinks, open_sinks, records_folder, silent_sinks

__all__ = [
    "METRICS_FILE",
    "Held",
    "Meter",
    "MetricsConfig",
    "ProfilingConfig",
    "Sinks",
    "draw_loss",
    "measure_matmul_flops",
    "metrics_problems",
    "open_meter",
    "open_profiler",
    "open_sinks",
    "peak_flops",
    "peak_memory_bytes",
    "profiling_problems",
    "records_folder",
    "silent_sinks",
]
