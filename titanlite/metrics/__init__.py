"""Metrics of a run: sinks, throughput, hardware peaks, the profiler and memory snapshots."""

from __future__ import annotations

from titanlite.metrics.hardware import cpu_has_bf16_units, measure_matmul_flops, peak_memory_bytes
from titanlite.metrics.jsonl import METRICS_FILE, metrics_folder
from titanlite.metrics.profiler import (
    Profiler,
    ProfilingConfig,
    build_profilers,
    check_profiling_config,
)
from titanlite.metrics.sinks import (
    SINKS,
    MetricsConfig,
    MetricSinks,
    SinkContext,
    check_metrics_config,
    open_sinks,
)
from titanlite.metrics.throughput import PhaseTimer, ThroughputMeter, build_meter

__all__ = [
    "METRICS_FILE",
    "SINKS",
    "MetricSinks",
    "MetricsConfig",
    "PhaseTimer",
    "Profiler",
    "ProfilingConfig",
    "SinkContext",
    "ThroughputMeter",
    "build_meter",
    "build_profilers",
    "check_metrics_config",
    "check_profiling_config",
    "cpu_has_bf16_units",
    "measure_matmul_flops",
    "metrics_folder",
    "open_sinks",
    "peak_memory_bytes",
]
